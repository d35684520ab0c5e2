#include "llmopt/draft_trees.h"

#include <gtest/gtest.h>

#include <vector>

namespace llmopt {
namespace {

struct Rows {
  std::vector<int64_t> ids{10, 11, 12, 13, 20, 21, -1, -1};
  std::vector<int32_t> counts{4, 2};
  std::vector<int32_t> parents{-1, -1, 0, 2, -1, 0, 9, 9};
  std::vector<uint64_t> masks = std::vector<uint64_t>(8, 99);
  std::vector<int64_t> depths = std::vector<int64_t>(8, 99);

  DraftForm plant(int64_t vocab_size = 100) {
    return plant_trees(2, 4, ids.data(), counts.data(), parents.data(), vocab_size, masks.data(), depths.data());
  }
};

TEST(DraftTrees, MasksHoldThePathToEachDraft) {
  Rows rows;
  EXPECT_EQ(rows.plant(), DraftForm::kTrees);
  EXPECT_EQ(rows.masks, (std::vector<uint64_t>{1, 2, 5, 13, 1, 3, 0, 0}));
  EXPECT_EQ(rows.depths, (std::vector<int64_t>{1, 1, 2, 3, 1, 2, 0, 0}));
}

TEST(DraftTrees, ChainsAreToldFromTrees) {
  Rows rows;
  rows.parents = {-1, 0, 1, 2, -1, 0, 9, 9};
  EXPECT_EQ(rows.plant(), DraftForm::kChains);
  EXPECT_EQ(plant_trees(2, 4, rows.ids.data(), rows.counts.data(), nullptr, 100, nullptr, nullptr), DraftForm::kChains);
}

TEST(DraftTrees, WhatCannotRunIsBroken) {
  Rows rows;
  EXPECT_EQ(rows.plant(21), DraftForm::kBroken);  // id 21
  rows = Rows();
  rows.ids[5] = -1;
  EXPECT_EQ(rows.plant(), DraftForm::kBroken);
  rows = Rows();
  rows.parents[2] = 2;  // follows itself
  EXPECT_EQ(rows.plant(), DraftForm::kBroken);
  rows = Rows();
  rows.parents[1] = -2;
  EXPECT_EQ(rows.plant(), DraftForm::kBroken);
  rows = Rows();
  rows.ids[1] = 10;  // twins
  EXPECT_EQ(rows.plant(), DraftForm::kBroken);
  rows.parents[1] = 0;  // the same token, one behind the other
  EXPECT_EQ(rows.plant(), DraftForm::kTrees);
}

}  // namespace
}  // namespace llmopt
