#include "llmopt/move_tokens.h"

#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>
#include <vector>

namespace llmopt {
namespace {

constexpr int kBlocks = 4, kHeads = 3, kBlockSize = 5;

// A tensor whose bytes tell where they were at first.
struct Tensor {
  std::vector<std::byte> bytes;
  int64_t row_bytes;

  explicit Tensor(int64_t row_bytes) : bytes(kBlocks * kHeads * kBlockSize * row_bytes), row_bytes(row_bytes) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i / row_bytes);
  }
  TokenRows rows() { return {bytes.data(), kBlocks, kHeads, row_bytes}; }
  std::byte at(int64_t place, int head) const {
    return bytes[((place / kBlockSize * kHeads + head) * kBlockSize + place % kBlockSize) * row_bytes];
  }
};

TEST(MoveTokens, EachTensorHasTheTokensAtTheirNewPlacesInTheOrderOfTheMoves) {
  Tensor key(7), value(2);
  const Tensor before(7), value_before(2);
  const std::vector<TokenRows> rows{key.rows(), value.rows()};
  move_tokens(rows, kBlockSize, std::vector<int64_t>{8, 11, 19, 3}, std::vector<int64_t>{6, 8, 11, 3});
  for (int head = 0; head < kHeads; ++head) {
    for (int place = 0; place < kBlocks * kBlockSize; ++place) {
      const int from = place == 6 ? 8 : place == 8 ? 11 : place == 11 ? 19 : place;
      EXPECT_EQ(key.at(place, head), before.at(from, head)) << place;
      EXPECT_EQ(value.at(place, head), value_before.at(from, head)) << place;
    }
  }
}

TEST(MoveTokens, NothingMovesWhenAPlaceDoesNotExist) {
  Tensor key(4);
  const std::vector<std::byte> before = key.bytes;
  const std::vector<TokenRows> rows{key.rows()};
  EXPECT_THROW(move_tokens(rows, kBlockSize, std::vector<int64_t>{1, 20}, std::vector<int64_t>{0, 2}),
               std::out_of_range);
  EXPECT_THROW(move_tokens(rows, kBlockSize, std::vector<int64_t>{1, 2}, std::vector<int64_t>{0, -1}),
               std::out_of_range);
  EXPECT_THROW(move_tokens(rows, kBlockSize, std::vector<int64_t>{1, 2}, std::vector<int64_t>{0}),
               std::invalid_argument);
  EXPECT_EQ(key.bytes, before);
}

}  // namespace
}  // namespace llmopt
