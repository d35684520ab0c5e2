#include "llmopt/prefix_index.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <utility>
#include <vector>

namespace llmopt {
namespace {

using Ids = std::vector<int64_t>;
using Blocks = std::vector<int32_t>;

constexpr int32_t kSize = 2;

class PrefixIndexTest : public testing::Test {
 protected:
  // Enters blocks of tokens under these keys behind an entry.
  std::pair<int32_t, int64_t> enter(const Blocks& blocks, const Ids& ids, const std::vector<BlockKey>& keys,
                                    int64_t serial) {
    return index_.enter(blocks, ids, keys, std::vector<Digest>(keys.size()), serial, true);
  }

  BlockPool pool_{8};
  PrefixIndex index_{pool_, kSize};
  int64_t root_ = index_.new_serial();
  Blocks held_ = pool_.allocate(6);
};

TEST_F(PrefixIndexTest, FindsWhatWasEnteredUpToTheFirstBlockThatDiffers) {
  const std::vector<BlockKey> keys{{1, 0}, {2, 0}, {3, 0}};
  const auto [count, last] = enter({held_[0], held_[1], held_[2]}, {5, 6, 7, 8, 9, 10}, keys, root_);
  EXPECT_EQ(count, 3);
  EXPECT_EQ(last, index_.serials()[held_[2]]);
  EXPECT_EQ(index_.match(root_, keys, Ids{5, 6, 7, 8, 9, 10}), (Blocks{held_[0], held_[1], held_[2]}));
  EXPECT_EQ(index_.match(root_, keys, Ids{5, 6, 7, 9, 9, 10}), Blocks{held_[0]});
  EXPECT_EQ(index_.num_collisions(), 1);
  EXPECT_TRUE(index_.match(index_.new_serial(), keys, Ids{5, 6, 7, 8, 9, 10}).empty());
  EXPECT_EQ(index_.num_collisions(), 1);  // the same tokens behind another salt
}

TEST_F(PrefixIndexTest, OfEqualContentsTheOlderStandsAndOtherContentsWithItsKeyEndTheRun) {
  const int64_t first = enter({held_[0]}, {5, 6}, {{1, 0}}, root_).second;
  EXPECT_EQ(enter({held_[1], held_[2]}, {5, 6, 7, 8}, {{1, 0}, {2, 0}}, root_).first, 2);
  EXPECT_EQ(index_.serials()[held_[1]], 0);
  EXPECT_EQ(index_.parents()[held_[2]], first);
  EXPECT_EQ(enter({held_[3], held_[4]}, {9, 9, 7, 8}, {{1, 0}, {4, 0}}, root_).first, 0);
  EXPECT_EQ(index_.num_collisions(), 1);
  EXPECT_EQ(enter({held_[3], -1, held_[4]}, {9, 9, 7, 8, 1, 1}, {{5, 0}, {6, 0}, {7, 0}}, root_).first, 1);
}

TEST_F(PrefixIndexTest, OfThePartsTheOldestLongestIsFoundUntilItIsForgotten) {
  enter({held_[0]}, {5, 6}, {{1, 0}}, root_);
  index_.enter_part(held_[1], Ids{7}, {2, 0}, root_);
  enter({held_[2]}, {7, 9}, {{3, 0}}, root_);
  EXPECT_EQ(index_.followers(root_), (Blocks{held_[0], held_[1], held_[2]}));
  EXPECT_EQ(index_.match_part(root_, Ids{7}), std::pair(held_[1], 1));
  EXPECT_EQ(index_.match_part(root_, Ids{7, 9}), std::pair(held_[2], 2));
  EXPECT_EQ(index_.match_part(root_, Ids{}), std::pair(-1, 0));
  pool_.drop_key(held_[1]);
  index_.forget(Blocks{held_[1]});
  EXPECT_EQ(index_.followers(root_), (Blocks{held_[0], held_[2]}));
  EXPECT_EQ(index_.match_part(root_, Ids{7}), std::pair(held_[2], 1));
}

TEST_F(PrefixIndexTest, WhatFollowsAForgottenBlockIsNotFoundAndCanBeForgottenAfterIt) {
  const std::vector<BlockKey> keys{{1, 0}, {2, 0}};
  enter({held_[0], held_[1]}, {5, 6, 7, 8}, keys, root_);
  pool_.drop_key(held_[0]);
  index_.forget(Blocks{held_[0]});
  EXPECT_TRUE(index_.match(root_, keys, Ids{5, 6, 7, 8}).empty());
  EXPECT_EQ(enter({held_[2]}, {5, 6}, {{1, 0}}, root_).first, 1);
  EXPECT_EQ(index_.match(root_, keys, Ids{5, 6, 7, 8}), Blocks{held_[2]});  // another entry than the one it followed
  index_.forget(Blocks{held_[1], held_[1], held_[5]});
  EXPECT_EQ(index_.serials()[held_[1]], 0);
}

TEST_F(PrefixIndexTest, RefusesSizesThatDoNotFitAndBlocksThatThePoolLacks) {
  const std::vector<BlockKey> keys{{1, 0}, {2, 0}};
  EXPECT_THROW(index_.match(root_, keys, Ids{5, 6, 7}), std::invalid_argument);
  EXPECT_THROW(enter({held_[0], held_[1]}, {5, 6, 7}, keys, root_), std::invalid_argument);
  EXPECT_THROW(enter({8}, {5, 6}, {{1, 0}}, root_), std::out_of_range);
  EXPECT_THROW(index_.enter_part(held_[0], Ids{1, 2, 3}, {1, 0}, root_), std::invalid_argument);
  EXPECT_THROW(enter({7}, {5, 6}, {{1, 0}}, root_), std::logic_error);  // nobody holds it
}

TEST_F(PrefixIndexTest, DigestsAreChainedAndLeaveOutWhatFillsNoBlock) {
  const std::vector<uint8_t> seed{1, 2, 3};
  const auto digests = index_.hash_blocks(seed, Ids{5, 6, 7, 8, 9});
  ASSERT_EQ(digests.size(), 2u);
  EXPECT_EQ(digests[0], blake2b_256(std::vector<uint8_t>{1, 2, 3, 5, 0, 0, 0, 6, 0, 0, 0}));
  EXPECT_EQ(index_.hash_blocks(digests[0], Ids{7, 8}), std::vector<Digest>{digests[1]});
  EXPECT_NE(digests[1], index_.hash_blocks(seed, Ids{7, 8})[0]);
}

}  // namespace
}  // namespace llmopt
