// Blocks of GGUF files taken apart: what the parts make is what dequantizing gives, and packing keeps both.
#include "llmopt/gguf_block.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "llmopt/quantized_panel.h"

namespace llmopt {
namespace {

constexpr GgufType kQuantized[] = {GgufType::kQ4_0, GgufType::kQ4_1, GgufType::kQ8_0, GgufType::kQ4_K, GgufType::kQ6_K};

// Random bits; the float16 parameters are kept finite by clearing the top bit of their exponents.
std::vector<std::byte> random_row(GgufType type, int64_t num_inputs, std::mt19937& random) {
  const GgufLayout layout = gguf_layout(type);
  const int64_t num_blocks = num_inputs / layout.block_values;
  std::vector<std::byte> row(num_blocks * layout.block_bytes);
  for (std::byte& byte : row) byte = static_cast<std::byte>(random() & 255);
  for (int64_t i = 0; i < num_blocks; ++i) {
    std::byte* block = row.data() + i * layout.block_bytes;
    const auto tame = [&](int offset) { block[offset + 1] &= std::byte{0xbf}; };
    tame(type == GgufType::kQ6_K ? 208 : 0);
    if (layout.has_minimum) tame(2);
  }
  return row;
}

class GgufBlock : public testing::TestWithParam<GgufType> {};

TEST_P(GgufBlock, PartsMakeTheDequantizedValues) {
  const GgufLayout layout = gguf_layout(GetParam());
  std::mt19937 random(1);
  for (int64_t num_blocks : {1, 2, 7}) {
    const int64_t num_inputs = num_blocks * layout.block_values, num_groups = num_inputs / layout.group_size;
    const std::vector<std::byte> row = random_row(GetParam(), num_inputs, random);
    std::vector<uint8_t> values(num_inputs);
    std::vector<float> scales(num_groups), minimums(num_groups), wanted(num_inputs);
    decode_gguf_row(GetParam(), row.data(), num_inputs, values.data(), scales.data(), minimums.data());
    dequantize_gguf_row(GetParam(), row.data(), num_inputs, wanted.data());
    for (int64_t k = 0; k < num_inputs; ++k) {
      const int64_t group = k / layout.group_size;
      const bool is_int8 = layout.format == WeightFormat::kInt8Group;
      const int q = is_int8 ? static_cast<int8_t>(values[k]) : layout.has_minimum ? values[k] : values[k] - 8;
      if (!is_int8) {
        ASSERT_LT(values[k], 16);
      }
      const float minimum = layout.has_minimum ? minimums[group] : 0.0f;
      ASSERT_FLOAT_EQ(wanted[k], scales[group] * static_cast<float>(q) + minimum) << k;
    }
  }
}

TEST_P(GgufBlock, PackedRowsAreTheDequantizedOnesWithinFloat16) {
  const GgufLayout layout = gguf_layout(GetParam());
  std::mt19937 random(2);
  const int64_t num_inputs = 512, num_groups = num_inputs / layout.group_size;
  const MatrixShape shape{layout.format, kPanelWidth, num_inputs, layout.group_size, layout.has_minimum};
  std::vector<std::vector<std::byte>> rows;
  std::vector<std::vector<uint8_t>> values(kPanelWidth, std::vector<uint8_t>(num_inputs));
  std::vector<std::vector<float>> scales(kPanelWidth, std::vector<float>(num_groups)), minimums = scales;
  QuantizedRows source;
  for (int r = 0; r < kPanelWidth; ++r) {
    rows.push_back(random_row(GetParam(), num_inputs, random));
    decode_gguf_row(GetParam(), rows[r].data(), num_inputs, values[r].data(), scales[r].data(), minimums[r].data());
    source.values[r] = values[r].data();
    source.scales[r] = scales[r].data();
    source.minimums[r] = layout.has_minimum ? minimums[r].data() : nullptr;
  }
  const std::unique_ptr<std::byte, void (*)(void*)> panel(
      static_cast<std::byte*>(std::aligned_alloc(64, panel_bytes(shape))), std::free);
  pack_quantized_panel(shape, source, panel.get());
  std::vector<float> wanted(num_inputs), found(num_inputs);
  for (int r = 0; r < kPanelWidth; ++r) {
    dequantize_gguf_row(GetParam(), rows[r].data(), num_inputs, wanted.data());
    unpack_row({shape, panel.get()}, r, found.data());
    for (int64_t k = 0; k < num_inputs; ++k) {
      const int64_t group = k / layout.group_size;
      // half a step of 11 bits of scale * q and of the minimum, or of the smallest float16
      const float size = std::abs(scales[r][group]) * 128 + std::abs(layout.has_minimum ? minimums[r][group] : 0.0f);
      ASSERT_NEAR(found[k], wanted[k], size * 0x1p-11f + 129 * 0x1p-25f) << r << " " << k;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, GgufBlock, testing::ValuesIn(kQuantized));

TEST(GgufRow, PlainTypesAreConverted) {
  const float one[] = {1.5f, -2.0f};
  const uint16_t half[] = {0x3e00, 0xc000}, brain[] = {0x3fc0, 0xc000};
  const std::pair<GgufType, const void*> rows[] = {
      {GgufType::kFloat32, one}, {GgufType::kFloat16, half}, {GgufType::kBFloat16, brain}};
  for (const auto& [type, row] : rows) {
    float found[2];
    dequantize_gguf_row(type, static_cast<const std::byte*>(row), 2, found);
    EXPECT_EQ(found[0], 1.5f);
    EXPECT_EQ(found[1], -2.0f);
  }
}

TEST(GgufRow, WhatIsNotReadIsRefused) {
  EXPECT_THROW(gguf_layout(static_cast<GgufType>(6)), std::invalid_argument);
  float out[40];
  const std::byte row[64] = {};
  EXPECT_THROW(dequantize_gguf_row(GgufType::kQ8_0, row, 40, out), std::invalid_argument);
}

}  // namespace
}  // namespace llmopt
