#include "llmopt/fingerprint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

namespace llmopt {
namespace {

std::vector<std::byte> noise(int64_t size) {
  std::mt19937 random(0);
  std::vector<std::byte> made(size);
  for (std::byte& byte : made) byte = static_cast<std::byte>(random() & 255);
  return made;
}

TEST(Fingerprint, DependsNeitherOnTheAddressNorOnTheThreads) {
  for (int64_t size : {0, 1, 63, 64, 65, 1 << 20, (2 << 20) + 77}) {
    const std::vector<std::byte> data = noise(size);
    const uint64_t expected = fingerprint(data.data(), size, 1);
    std::vector<std::byte> moved(size + 1);
    std::copy(data.begin(), data.end(), moved.begin() + 1);
    for (int threads : {1, 2, 5}) EXPECT_EQ(fingerprint(moved.data() + 1, size, threads), expected) << size;
  }
}

TEST(Fingerprint, IsAnotherOneAfterAnyChangeOfASignAndForAnyLength) {
  std::vector<std::byte> data = noise(4096);
  std::set<uint64_t> found;
  int64_t count = 0;
  for (int64_t size = 0; size <= 4096; ++size, ++count) found.insert(fingerprint(data.data(), size, 1));
  for (int64_t last = 1; last < 4096; last += 2, ++count) {  // the signs of ever more bfloat16 values
    data[last] ^= std::byte{0x80};
    found.insert(fingerprint(data.data(), 4096, 1));
  }
  EXPECT_EQ(static_cast<int64_t>(found.size()), count);
}

}  // namespace
}  // namespace llmopt
