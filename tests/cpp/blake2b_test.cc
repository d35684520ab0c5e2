#include "llmopt/blake2b.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace llmopt {
namespace {

std::string hex(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::vector<uint8_t> message(size_t count) {
  std::vector<uint8_t> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(i * 7);
  return bytes;
}

// What hashlib.blake2b(..., digest_size=32) of Python gives, around the ends of blocks of 128 bytes.
TEST(Blake2b, GivesTheDigestsOfTheStandard) {
  EXPECT_EQ(hex(blake2b_256(std::vector<uint8_t>{'a', 'b', 'c'})),
            "bddd813c634239723171ef3fee98579b94964e3bb1cb3e427262c8c068d52319");
  const std::pair<size_t, const char*> known[] = {
      {0, "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"},
      {127, "4ff62e7c4c43fe101a078479c48836be4907d9d498dcc577ca89d694b2c11f9b"},
      {128, "14696d2a98d9f8a280da8b132b1045b345e1033759c6b02fcc4ee885c8ae7c37"},
      {129, "3934215260b1039be9d9d2b073b059bcd50120c327a22af93eb4d98cf821c14c"},
      {256, "3d0cb2693dfbac42af5a6cc960953fea8714aa39c4bcd054ef61d6b5e98ade4a"},
      {300, "91ccce0ba9e15867934e70e07d8d4af1270ec75748be56a3f48f5bc8b6c3967d"},
  };
  for (const auto& [count, digest] : known) EXPECT_EQ(hex(blake2b_256(message(count))), digest) << count << " bytes";
}

}  // namespace
}  // namespace llmopt
