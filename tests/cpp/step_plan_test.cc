#include "llmopt/step_plan.h"

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace llmopt {
namespace {

// Arrays of a step with block ids 0, 1, 2, ...
struct Step {
  std::vector<int32_t> block_tables, seq_lens, cu_seqlens_q{0};
  int max_blocks;

  Step(std::vector<int> q_lens, std::vector<int32_t> kv_lens, int blocks = 1000)
      : block_tables(blocks * q_lens.size()), seq_lens(kv_lens), max_blocks(blocks) {
    for (int q_len : q_lens) cu_seqlens_q.push_back(cu_seqlens_q.back() + q_len);
    for (size_t b = 0; b < q_lens.size(); ++b) {
      std::iota(block_tables.begin() + b * blocks, block_tables.begin() + (b + 1) * blocks, 0);
    }
  }

  StepInputs inputs() const {
    StepInputs inputs;
    inputs.block_tables = block_tables.data();
    inputs.block_table_stride = inputs.max_blocks = max_blocks;
    inputs.seq_lens = seq_lens;
    inputs.cu_seqlens_q = cu_seqlens_q;
    return inputs;
  }
};

WorkShape shape(int num_kv_heads = 2, int group = 3, int window = 0) {
  return {num_kv_heads, group, /*block_size=*/16, /*num_blocks=*/1000, 64, 64, 4, window, /*rows_limit=*/8};
}

template <class Error, class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(StepPlan, ItemsCoverEachVisiblePairOfQueryAndKeyOnce) {
  for (int window : {0, 1, 40, 700}) {
    const std::vector<int> q_lens{1, 5, 300, 1, 0, 64};
    const std::vector<int32_t> kv_lens{5000, 5, 900, 1, 10, 7000};
    const Step step(q_lens, kv_lens);
    StepPlan plan;
    plan.update(step.inputs());
    const WorkList& work = plan.work(shape(1, 3, window));
    for (size_t b = 0; b < q_lens.size(); ++b) {
      for (int q = 0; q < q_lens[b]; ++q) {
        std::vector<int> seen(kv_lens[b]);
        for (const WorkItem& item : work.items) {
          if (item.request != static_cast<int>(b) || q < item.q_begin || q >= item.q_begin + item.num_q) continue;
          for (int k = item.key_begin; k < item.key_end; ++k) ++seen[k];
        }
        const int position = kv_lens[b] - q_lens[b] + q;
        for (int k = window > 0 ? std::max(0, position - window + 1) : 0; k <= position; ++k) ASSERT_EQ(seen[k], 1);
      }
    }
  }
}

TEST(StepPlan, PartsOfASplitAreNumberedAndHaveTheirOwnRows) {
  const Step step({1, 1}, {4000, 9000});
  StepPlan plan;
  plan.update(step.inputs());
  const WorkList& work = plan.work(shape());
  EXPECT_EQ(work.num_splits, 2);
  std::vector<int> rows(work.num_partial_rows);
  for (const WorkItem& item : work.items) {
    EXPECT_GT(item.num_parts, 1);
    EXPECT_LT(item.part, item.num_parts);
    for (int r = 0; r < item.num_q * 3; ++r) ++rows[item.row + r];
  }
  for (int count : rows) EXPECT_EQ(count, 1);
}

TEST(StepPlan, TheSplitOfARequestDoesNotDependOnTheOthers) {
  const Step alone({1}, {4000}), together({200, 1, 1}, {200, 4000, 10});
  StepPlan plan, plan2;
  plan.update(alone.inputs());
  plan2.update(together.inputs());
  std::vector<std::pair<int, int>> ranges, ranges2;
  for (const WorkItem& item : plan.work(shape()).items) ranges.emplace_back(item.key_begin, item.key_end);
  for (const WorkItem& item : plan2.work(shape()).items) {
    if (item.request == 1) ranges2.emplace_back(item.key_begin, item.key_end);
  }
  std::sort(ranges.begin(), ranges.end());
  std::sort(ranges2.begin(), ranges2.end());
  EXPECT_EQ(ranges, ranges2);
}

TEST(StepPlan, ANewStepForgetsTheOldSplit) {
  const Step first({1}, {40}), second({1, 1}, {50, 60});
  StepPlan plan;
  plan.update(first.inputs());
  EXPECT_EQ(plan.work(shape()).items.size(), 1u);
  plan.update(second.inputs());
  EXPECT_EQ(plan.work(shape()).items.size(), 2u);
  EXPECT_EQ(plan.num_tokens(), 2);
}

TEST(StepPlan, ArraysThatDoNotFitAreRefusedWithBothSides) {
  StepPlan plan;
  Step step({1, 1}, {40, 40});
  step.cu_seqlens_q = {0, 1};
  EXPECT_EQ(message_of<std::invalid_argument>([&] { plan.update(step.inputs()); }),
            "cu_seqlens_q has 2 entries, seq_lens has 2; cu_seqlens_q must have one more.");
  step.cu_seqlens_q = {1, 1, 2};
  EXPECT_EQ(message_of<std::invalid_argument>([&] { plan.update(step.inputs()); }),
            "cu_seqlens_q starts with 1; it must start with 0.");
  step.cu_seqlens_q = {0, 2, 1};
  EXPECT_EQ(message_of<std::invalid_argument>([&] { plan.update(step.inputs()); }),
            "cu_seqlens_q falls from 2 to 1 at request 1.");
}

TEST(StepPlan, BlocksOutsideOfTheCacheAreRefusedUnlessTheyAreOutsideOfTheWindow) {
  Step step({1}, {40});
  StepPlan plan;
  step.block_tables[0] = -1;
  plan.update(step.inputs());
  EXPECT_EQ(message_of<std::out_of_range>([&] { plan.work(shape()); }),
            "block_tables[0, 0] is -1, the cache has blocks 0 to 999.");
  EXPECT_NO_THROW(plan.work(shape(2, 3, /*window=*/24)));
  EXPECT_THROW(plan.work(shape(2, 3, /*window=*/25)), std::out_of_range);
}

TEST(StepPlan, ATableTooShortForTheKeysIsRefused) {
  const Step step({1}, {33}, /*blocks=*/2);
  StepPlan plan;
  plan.update(step.inputs());
  EXPECT_EQ(message_of<std::invalid_argument>([&] { plan.work(shape()); }),
            "request 0 has 33 keys, but its block table of 2 blocks holds 32.");
}

TEST(StepPlan, MasksThatAreNoTreesAreRefused) {
  const Step step({1, 4}, {9, 20});
  const auto refusal = [&](std::vector<int32_t> num_drafts, std::vector<uint64_t> masks) {
    StepInputs inputs = step.inputs();
    inputs.num_drafts = num_drafts;
    inputs.draft_masks = masks;
    StepPlan plan;
    return message_of<std::invalid_argument>([&] { plan.update(inputs); });
  };
  EXPECT_EQ(refusal({0, 3}, {0, 0, 1, 3, 5}), "nothing was thrown");
  EXPECT_NE(refusal({0, 3}, {0, 0, 1, 3, 1}).find("draft_masks[4] is 1"), std::string::npos);
  EXPECT_NE(refusal({0, 3}, {0, 1, 1, 3, 5}).find("draft_masks[1] is 1"), std::string::npos);
  EXPECT_NE(refusal({0, 3}, {0, 0, 1, 3, 13}).find("draft_masks[4] is 13"), std::string::npos);
  EXPECT_EQ(refusal({0, 4}, {0, 1, 3, 5, 9}), "nothing was thrown");
  EXPECT_EQ(refusal({0, 6}, {0, 4, 9, 17, 33}), "nothing was thrown");  // the first two are no queries
  EXPECT_NE(refusal({0, 6}, {0, 1, 2, 4, 8}).find("draft_masks[1] is 1"), std::string::npos);
  EXPECT_NE(refusal({0, 20}, {0, 1, 3, 5, 9}).find("request 1 has 20 drafts among 20 keys"), std::string::npos);
  EXPECT_NE(refusal({1, 3}, {0, 0, 1, 3, 5}).find("draft_masks[0] is 0"), std::string::npos);
  EXPECT_NE(refusal({0, 3}, {0, 0, 1, 3}).find("draft_masks has 4 entries"), std::string::npos);
  EXPECT_NE(refusal({3}, {0, 0, 1, 3, 5}).find("num_drafts 1"), std::string::npos);
}

}  // namespace
}  // namespace llmopt
