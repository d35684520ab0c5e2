#include "llmopt/pack_drafts.h"

#include <gtest/gtest.h>

#include <vector>

namespace llmopt {
namespace {

// Two requests with blocks of 4 tokens; the second one's newest token is the last of its block.
struct Rows {
  std::vector<int64_t> ids{7, 8}, positions{5, 3};
  std::vector<int32_t> seq_lens{6, 4}, tables{10, 11, 0, 20, 21, 22};
  std::vector<int64_t> draft_ids{30, 31, 32, 33, -1, -1};
  std::vector<int32_t> counts{3, 1}, parents{-1, -1, 0, -1, 9, 9};
  std::vector<int64_t> packed_ids = std::vector<int64_t>(6, 99), packed_positions = packed_ids, slots = packed_ids;
  std::vector<uint64_t> masks = std::vector<uint64_t>(6, 99);
  std::vector<int32_t> num_scheduled{99, 99}, packed_lens{99, 99}, cu_seqlens{99, 99, 99};

  DraftForm pack(bool has_parents = true, int64_t table_width = 3) {
    return pack_drafts({2, ids.data(), positions.data(), seq_lens.data(), tables.data(), 3, table_width, 4},
                       {draft_ids.data(), counts.data(), has_parents ? parents.data() : nullptr, 3}, 100,
                       {packed_ids.data(), packed_positions.data(), slots.data(), masks.data(), num_scheduled.data(),
                        packed_lens.data(), cu_seqlens.data()});
  }
};

TEST(PackDrafts, DraftsFollowTheTokenOfTheirRow) {
  Rows rows;
  EXPECT_EQ(rows.pack(), DraftForm::kTrees);
  EXPECT_EQ(rows.packed_ids, (std::vector<int64_t>{7, 30, 31, 32, 8, 33}));
  EXPECT_EQ(rows.packed_positions, (std::vector<int64_t>{5, 6, 6, 7, 3, 4}));
  EXPECT_EQ(rows.slots, (std::vector<int64_t>{45, 46, 47, 0, 83, 84}));
  EXPECT_EQ(rows.masks, (std::vector<uint64_t>{0, 1, 2, 5, 0, 1}));
  EXPECT_EQ(rows.num_scheduled, (std::vector<int32_t>{4, 2}));
  EXPECT_EQ(rows.packed_lens, (std::vector<int32_t>{9, 5}));
  EXPECT_EQ(rows.cu_seqlens, (std::vector<int32_t>{0, 4, 6}));
}

TEST(PackDrafts, ChainsHaveAscendingPositionsAndNoMasks) {
  Rows rows;
  EXPECT_EQ(rows.pack(false), DraftForm::kChains);
  EXPECT_EQ(rows.packed_positions, (std::vector<int64_t>{5, 6, 7, 8, 3, 4}));
  EXPECT_EQ(rows.masks, std::vector<uint64_t>(6, 99));
}

TEST(PackDrafts, SlotsStayInsideTheTableAndAreMinusOneWithoutOne) {
  Rows rows;
  rows.pack(true, 1);
  EXPECT_EQ(rows.slots, (std::vector<int64_t>{41, 42, 43, 40, 83, 80}));
  rows.pack(true, 0);
  EXPECT_EQ(rows.slots, std::vector<int64_t>(6, -1));
}

TEST(PackDrafts, NothingIsFilledForDraftsThatCannotRun) {
  Rows rows;
  rows.draft_ids[3] = 100;
  EXPECT_EQ(rows.pack(), DraftForm::kBroken);
  EXPECT_EQ(rows.packed_ids, std::vector<int64_t>(6, 99));
  EXPECT_EQ(rows.cu_seqlens, std::vector<int32_t>(3, 99));
}

}  // namespace
}  // namespace llmopt
