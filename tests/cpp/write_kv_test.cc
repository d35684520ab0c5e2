#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>
#include <vector>

#include "llmopt/attention.h"

namespace llmopt {
namespace {

constexpr int kHeads = 2, kBlockSize = 4, kHeadDim = 3, kHeadDimV = 5, kBlocks = 6;
constexpr float kUntouched = -77;

struct Fixture {
  std::vector<float> key_cache = std::vector<float>(kBlocks * kHeads * kBlockSize * kHeadDim, kUntouched);
  std::vector<float> value_cache = std::vector<float>(kBlocks * kHeads * kBlockSize * kHeadDimV, kUntouched);
  std::vector<float> key, value;
  std::vector<int64_t> slots;
  std::vector<int32_t> cu{0};
  StepPlan plan;

  explicit Fixture(std::vector<int64_t> slot_mapping) : slots(std::move(slot_mapping)) {
    key.resize(slots.size() * kHeads * kHeadDim);
    value.resize(slots.size() * kHeads * kHeadDimV);
    std::iota(key.begin(), key.end(), 0.0f);
    std::iota(value.begin(), value.end(), 1000.0f);
    StepInputs inputs;
    inputs.cu_seqlens_q = cu;
    inputs.slot_mapping = slots;
    plan.update(inputs);
  }

  LayerCache cache() {
    return {key_cache.data(), value_cache.data(), kBlocks, kHeads, kBlockSize, kHeadDim, kHeadDimV, DType::kFloat32};
  }
  WriteKvArgs args() const {
    return {key.data(),
            kHeads * kHeadDim,
            kHeadDim,
            value.data(),
            kHeads * kHeadDimV,
            kHeadDimV,
            static_cast<int64_t>(slots.size()),
            kHeads,
            kHeadDim,
            kHeadDimV};
  }
};

TEST(WriteKv, TokensLandInTheirSlotsAndTheRestIsUntouched) {
  Fixture f({7, -1, 0, 23});
  write_kv(f.args(), f.cache(), f.plan, 2);
  int untouched = 0;
  for (int slot = 0; slot < kBlocks * kBlockSize; ++slot) {
    int token = -1;
    for (size_t t = 0; t < f.slots.size(); ++t) token = f.slots[t] == slot ? static_cast<int>(t) : token;
    for (int head = 0; head < kHeads; ++head) {
      const int row = (slot / kBlockSize * kHeads + head) * kBlockSize + slot % kBlockSize;
      for (int d = 0; d < kHeadDim; ++d) {
        const float expected = token < 0 ? kUntouched : f.key[(token * kHeads + head) * kHeadDim + d];
        ASSERT_EQ(f.key_cache[row * kHeadDim + d], expected);
      }
      for (int d = 0; d < kHeadDimV; ++d) {
        const float expected = token < 0 ? kUntouched : f.value[(token * kHeads + head) * kHeadDimV + d];
        ASSERT_EQ(f.value_cache[row * kHeadDimV + d], expected);
      }
      untouched += token < 0;
    }
  }
  EXPECT_EQ(untouched, (kBlocks * kBlockSize - 3) * kHeads);
}

TEST(WriteKv, ASlotPastTheEndIsRefusedAndNothingIsWritten) {
  Fixture f({1, kBlocks * kBlockSize});
  EXPECT_THROW(write_kv(f.args(), f.cache(), f.plan, 1), std::out_of_range);
  for (float x : f.key_cache) ASSERT_EQ(x, kUntouched);
}

TEST(WriteKv, SizesThatDifferFromTheCacheAreRefused) {
  Fixture f({1});
  WriteKvArgs args = f.args();
  args.head_dim_v += 1;
  EXPECT_THROW(write_kv(args, f.cache(), f.plan, 1), std::invalid_argument);
  args = f.args();
  args.num_tokens = 0;
  EXPECT_THROW(write_kv(args, f.cache(), f.plan, 1), std::invalid_argument);
}

}  // namespace
}  // namespace llmopt
