#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "core/attention/kernels.h"
#include "llmopt/attention.h"

namespace llmopt {
namespace {

constexpr int kHeads = 2, kBlockSize = 4, kHeadDim = 12, kHeadDimV = 5, kBlocks = 6;
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

TEST(WriteKv, QuantizedRowsAreWithinHalfAStepOfTheTokensAndTheRestIsUntouched) {
  Fixture f({7, -1, 0, 23});
  constexpr int kKeyBytes = kHeadDim + kScaleBytes, kValueBytes = kHeadDimV + kScaleBytes;
  std::vector<int8_t> keys(kBlocks * kHeads * kBlockSize * kKeyBytes, 55);
  std::vector<int8_t> values(kBlocks * kHeads * kBlockSize * kValueBytes, 55);
  LayerCache cache = f.cache();
  cache.key = keys.data();
  cache.value = values.data();
  cache.is_quantized = true;
  f.key[0] = 1e30f;  // one large value takes the others of its row to zero
  f.key[5] = -0.0f;
  write_kv(f.args(), cache, f.plan, 2);
  const auto check = [&](const std::vector<int8_t>& stored, std::vector<float> from, int dim, bool is_rotated) {
    for (size_t row = 0; is_rotated && row < from.size(); row += dim) {
      attention::kernels(selected_isa()).rotate_row_f32(from.data() + row, dim, from.data() + row);
    }
    for (int slot = 0; slot < kBlocks * kBlockSize; ++slot) {
      int token = -1;
      for (size_t t = 0; t < f.slots.size(); ++t) token = f.slots[t] == slot ? static_cast<int>(t) : token;
      for (int head = 0; head < kHeads; ++head) {
        const int row = (slot / kBlockSize * kHeads + head) * kBlockSize + slot % kBlockSize;
        const int8_t* at = stored.data() + row * (dim + kScaleBytes);
        uint16_t half;
        std::memcpy(&half, at + dim, sizeof(half));
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        float scale;
        std::memcpy(&scale, &bits, sizeof(scale));
        for (int d = 0; d < dim; ++d) {
          if (token < 0) {
            ASSERT_EQ(at[d], 55);
            continue;
          }
          const float wanted = from[(token * kHeads + head) * dim + d];
          ASSERT_LE(std::abs(at[d] * scale - wanted), 0.501f * scale) << "token " << token << " column " << d;
        }
      }
    }
  };
  check(keys, f.key, kHeadDim, true);
  check(values, f.value, kHeadDimV, false);
}

TEST(WriteKv, AQuantizedRowWithAnInfinityOrANanIsNanAndOneOfZerosIsZero) {
  Fixture f({0, 1, 2});
  std::vector<int8_t> keys(kBlocks * kHeads * kBlockSize * (kHeadDim + kScaleBytes), 55), values(10000, 55);
  LayerCache cache = f.cache();
  cache.key = keys.data();
  cache.value = values.data();
  cache.is_quantized = true;
  f.key.assign(f.key.size(), 0.0f);
  f.key[1] = std::numeric_limits<float>::infinity();
  f.key[kHeads * kHeadDim + 2] = std::numeric_limits<float>::quiet_NaN();
  write_kv(f.args(), cache, f.plan, 1);
  const auto scale = [&](int slot) {
    uint16_t bits;
    std::memcpy(&bits, keys.data() + slot * (kHeadDim + kScaleBytes) + kHeadDim, sizeof(bits));
    return bits;
  };
  EXPECT_GT(scale(0) & 0x7fff, 0x7f80);
  EXPECT_GT(scale(1) & 0x7fff, 0x7f80);
  EXPECT_EQ(scale(2), 0);
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
