// Integer weights: packing against plain rounding, products against a plain loop over the very integers. Memory has
// exactly the size that it must have, so that the address sanitizer sees a read or write past it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "llmopt/isa.h"
#include "llmopt/linear.h"
#include "llmopt/quantized_panel.h"

namespace llmopt {
namespace {

using Kind = LinearOutput::Kind;

std::vector<float> normal_values(std::mt19937& random, int64_t count, float deviation = 1.0f) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

float through_float16(float x) { return static_cast<float>(static_cast<_Float16>(x)); }

float from_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Packed {
  explicit Packed(const MatrixShape& shape)
      : memory(static_cast<std::byte*>(std::aligned_alloc(64, packed_bytes(shape))), std::free) {
    std::memset(memory.get(), 0xff, packed_bytes(shape));
    matrix.shape = shape;
    matrix.data = memory.get();
  }
  Packed(const MatrixShape& shape, const float* weights, const float* importance = nullptr) : Packed(shape) {
    for (int64_t panel = 0; panel < shape.num_panels(); ++panel) {
      SourceRows source;
      source.importance = importance;
      for (int i = 0; i < kPanelWidth && panel * kPanelWidth + i < shape.num_outputs; ++i) {
        source.rows[i] = weights + (panel * kPanelWidth + i) * shape.num_inputs;
      }
      pack_panel(shape, source, memory.get() + panel * panel_bytes(shape));
    }
  }
  std::vector<float> row(int64_t index) const {
    std::vector<float> values(matrix.shape.num_inputs);
    unpack_row(matrix, index, values.data());
    return values;
  }
  std::unique_ptr<std::byte, decltype(&std::free)> memory;
  PackedMatrix matrix;
};

// Every format that there is, for matrices of one size.
std::vector<MatrixShape> all_formats(int64_t outputs, int64_t inputs) {
  std::vector<MatrixShape> shapes = {{WeightFormat::kInt8, outputs, inputs}};
  for (int group : {16, 32, 64, 128}) shapes.push_back({WeightFormat::kInt8Group, outputs, inputs, group});
  for (int group : {32, 64, 128}) {
    shapes.push_back({WeightFormat::kInt4Group, outputs, inputs, group, false});
    shapes.push_back({WeightFormat::kInt4Group, outputs, inputs, group, true});
  }
  return shapes;
}

std::string text(const MatrixShape& shape) {
  return std::string(name(shape.format)) + " group " + std::to_string(shape.group_size) + " minimum " +
         std::to_string(shape.has_minimum) + " " + std::to_string(shape.num_outputs) + " x " +
         std::to_string(shape.num_inputs);
}

// What a row became, as numbers.
std::vector<double> input_row(const InputRows& rows, int64_t index) {
  std::vector<double> values(rows.num_inputs);
  const std::byte* data = rows.data + index * rows.row_bytes;
  for (int64_t k = 0; k < rows.num_inputs; ++k) {
    if (rows.form == InputForm::kBFloat16) {
      uint16_t half;
      std::memcpy(&half, data + 2 * k, 2);
      values[k] = from_bfloat16(half);
    } else {
      const bool is_token = rows.form == InputForm::kInt16Token;
      const double scale = is_token ? rows.scales[index] : rows.scales[index * rows.scale_stride + k / 32];
      const int value = static_cast<int8_t>(data[k]);
      values[k] = scale * (is_token ? 128 * value + static_cast<int8_t>(data[rows.row_bytes / 2 + k]) : value);
    }
  }
  return values;
}

void fill(InputBuffer& buffer, const MatrixShape& shape, int64_t rows, const float* values) {
  buffer.resize(input_form(shape, rows), rows, shape.num_inputs);
  for (int64_t r = 0; r < rows; ++r) {
    const std::vector<float> row(values + r * shape.num_inputs, values + (r + 1) * shape.num_inputs);
    buffer.fill_row(r, row.data());
  }
}

std::vector<float> multiply(const PackedMatrix& matrix, const InputRows& input, Kind kind = Kind::kStore) {
  const int64_t width = matrix.shape.num_outputs / (kind == Kind::kGated ? 2 : 1);
  std::vector<float> out(input.num_rows * width, 1.0f);
  LinearOutput output;
  output.kind = kind;
  output.out = out.data();
  output.row_stride = width;
  LinearScratch scratch;
  const TileScope tiles;
  const int64_t middle = matrix.shape.num_panels() / 4 * 2;
  linear(matrix, input, output, 0, middle, scratch);
  linear(matrix, input, output, middle, matrix.shape.num_panels(), scratch);
  return out;
}

void check_products(const Packed& packed, int64_t rows, std::mt19937& random, Kind kind = Kind::kStore) {
  const MatrixShape& shape = packed.matrix.shape;
  const auto values = normal_values(random, rows * shape.num_inputs);
  InputBuffer buffer;
  fill(buffer, shape, rows, values.data());
  const std::vector<float> got = multiply(packed.matrix, buffer.rows(), kind);
  std::vector<std::vector<float>> weights;
  for (int64_t n = 0; n < shape.num_outputs; ++n) weights.push_back(packed.row(n));
  for (int64_t r = 0; r < rows; ++r) {
    const auto x = input_row(buffer.rows(), r);
    const auto dot = [&](int64_t n, double* magnitude) {
      double sum = 0;
      *magnitude = 0;
      for (int64_t k = 0; k < shape.num_inputs; ++k) {
        sum += weights[n][k] * x[k];
        *magnitude += std::abs(weights[n][k] * x[k]);
      }
      return sum;
    };
    const int64_t width = shape.num_outputs / (kind == Kind::kGated ? 2 : 1);
    for (int64_t n = 0; n < width; ++n) {
      // Integers are exact and sums of groups are float32; tiles get the weights rounded to bfloat16.
      const double step = buffer.rows().form == InputForm::kBFloat16 ? 0x1p-9 : 2e-6;
      double want, bound, magnitude;
      if (kind == Kind::kGated) {
        const int64_t gate = n / kPanelWidth * 2 * kPanelWidth + n % kPanelWidth;
        double other_magnitude;
        const double left = dot(gate, &magnitude), right = dot(gate + kPanelWidth, &other_magnitude);
        want = left * right;
        bound = step *
                (magnitude * std::abs(right) + other_magnitude * std::abs(left) + magnitude * other_magnitude * step);
      } else {
        want = dot(n, &magnitude);
        bound = step * magnitude;
        if (kind == Kind::kAdd) want += 1;
      }
      ASSERT_NEAR(got[r * width + n], want, 1.5 * bound + 1e-6)
          << text(shape) << ", row " << r << " of " << rows << ", column " << n << ", kind " << static_cast<int>(kind);
    }
  }
}

TEST(IntLinear, EqualsPlainLoopForEveryFormatAndNumberOfRows) {
  std::mt19937 random(1);
  for (const MatrixShape& shape : all_formats(53, 300)) {
    const Packed packed(shape, normal_values(random, shape.num_outputs * shape.num_inputs).data());
    for (int64_t rows = 1; rows <= 90; rows += rows < 20 ? 1 : 14) check_products(packed, rows, random);
    if (HasFatalFailure()) return;
  }
}

TEST(IntLinear, EqualsPlainLoopForRandomShapes) {
  std::mt19937 random(2);
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 60; ++i) {
    const auto kind = static_cast<Kind>(pick(0, 2));
    const int64_t outputs = kind == Kind::kGated ? 32 * pick(1, 3) : pick(1, 90);
    const int64_t inputs = pick(0, 4) ? pick(1, 300) : pick(300, 2500);
    for (const MatrixShape& shape : all_formats(outputs, inputs)) {
      const Packed packed(shape, normal_values(random, outputs * inputs).data());
      check_products(packed, pick(0, 2) ? pick(1, 9) : pick(1, 80), random, kind);
      if (HasFatalFailure()) return;
    }
  }
}

// The sums of products are as large as they can be: nothing may saturate.
TEST(IntLinear, ExtremeValuesDoNotSaturate) {
  const int64_t inputs = 1024;
  for (const MatrixShape& shape : all_formats(16, inputs)) {
    if (shape.format == WeightFormat::kInt8) continue;
    std::vector<uint8_t> q(inputs);
    std::vector<float> ones(inputs, 1.0f);
    for (const int pattern : {0, 1, 2}) {
      const uint8_t low = shape.format == WeightFormat::kInt8Group ? 0x80 : 0, high = low ? 0x7f : 15;
      for (int64_t k = 0; k < inputs; ++k) q[k] = pattern == 0 ? low : pattern == 1 ? high : k % 3 ? low : high;
      QuantizedRows source;
      for (int c = 0; c < kPanelWidth; ++c) {
        source.values[c] = q.data();
        source.scales[c] = ones.data();
        if (shape.has_minimum) source.minimums[c] = ones.data();
      }
      const Packed packed(shape);
      pack_quantized_panel(shape, source, packed.memory.get());
      const std::vector<float> weights = packed.row(3);
      for (const float sign : {1.0f, -1.0f}) {
        const std::vector<float> values(inputs, sign);
        InputBuffer buffer;
        fill(buffer, shape, 1, values.data());
        double want = 0;
        for (float w : weights) want += sign * w;
        EXPECT_NEAR(multiply(packed.matrix, buffer.rows())[3], want, 1e-4 * inputs * 128) << text(shape);
        EXPECT_NEAR(multiply(packed.matrix, buffer.rows())[3], want, 2e-6 * std::abs(want) + 0.5) << text(shape);
      }
    }
  }
}

// The largest sums that 32 bits have to hold: every weight and every value of x is at its limit.
TEST(IntLinear, Int8HoldsTheSumsOfAsManyInputsAsItAccepts) {
  const MatrixShape shape{WeightFormat::kInt8, 16, 65536};
  for (const float sign : {1.0f, -1.0f}) {
    std::vector<float> weights(shape.num_outputs * shape.num_inputs, 1.0f);
    const Packed packed(shape, weights.data());
    for (const int64_t rows : {1, 6, 20}) {
      const std::vector<float> values(rows * shape.num_inputs, sign);
      InputBuffer buffer;
      fill(buffer, shape, rows, values.data());
      const float want = sign * 65536 * packed.row(0)[0];
      for (const float y : multiply(packed.matrix, buffer.rows())) ASSERT_NEAR(y, want, 0.1);
    }
  }
}

// Rounding x to 15 bits is what is left of the error when the weights are whole numbers.
TEST(IntLinear, Int8LosesLittleMoreThanItsWeightsDo) {
  std::mt19937 random(11);
  const MatrixShape shape{WeightFormat::kInt8, 32, 576};
  const Packed packed(shape, normal_values(random, shape.num_outputs * shape.num_inputs).data());
  const auto values = normal_values(random, shape.num_inputs);
  InputBuffer buffer;
  fill(buffer, shape, 1, values.data());
  const auto out = multiply(packed.matrix, buffer.rows());
  for (int64_t n = 0; n < shape.num_outputs; ++n) {
    const auto weights = packed.row(n);
    double want = 0, magnitude = 0;
    for (int64_t k = 0; k < shape.num_inputs; ++k) {
      want += static_cast<double>(weights[k]) * values[k];
      magnitude += std::pow(weights[k] * values[k], 2);
    }
    ASSERT_NEAR(out[n], want, 1e-3 * std::sqrt(magnitude));
  }
}

TEST(IntLinear, RowDoesNotDependOnTheOtherRows) {
  std::mt19937 random(3);
  for (const MatrixShape& shape : all_formats(40, 700)) {
    const Packed packed(shape, normal_values(random, shape.num_outputs * shape.num_inputs).data());
    const auto values = normal_values(random, 40 * shape.num_inputs);
    // Dot products and int8 tiles alike, up to the rows that are multiplied in bfloat16.
    std::vector<float> alone;
    for (int64_t rows = 1; rows <= 40; ++rows) {
      InputBuffer buffer;
      fill(buffer, shape, rows, values.data() + (40 - rows) * shape.num_inputs);
      const auto out = multiply(packed.matrix, buffer.rows());
      const std::vector<float> mine(out.end() - shape.num_outputs, out.end());
      if (alone.empty()) alone = mine;
      ASSERT_EQ(alone, mine) << text(shape) << " with " << rows << " rows";
    }
  }
}

TEST(IntLinear, NanInARowMakesThatRowNan) {
  std::mt19937 random(4);
  for (const MatrixShape& shape : all_formats(16, 130)) {
    const Packed packed(shape, normal_values(random, shape.num_outputs * shape.num_inputs).data());
    auto values = normal_values(random, 2 * shape.num_inputs);
    values[shape.num_inputs + 71] = std::nanf("");
    InputBuffer buffer;
    fill(buffer, shape, 2, values.data());
    const auto out = multiply(packed.matrix, buffer.rows());
    EXPECT_TRUE(std::isfinite(out[5])) << text(shape);
    EXPECT_TRUE(std::isnan(out[16 + 5])) << text(shape);
  }
}

TEST(IntInput, RowsAreWithinHalfAStepAndSumsAreTheirs) {
  std::mt19937 random(5);
  for (const InputForm form : {InputForm::kInt16Token, InputForm::kInt8Group}) {
    for (int64_t inputs : {1, 15, 16, 31, 32, 100, 128, 1000}) {
      InputBuffer buffer;
      buffer.resize(form, 3, inputs);
      for (int64_t r = 0; r < 3; ++r) {
        auto values = normal_values(random, inputs, r == 0 ? 0.0f : r == 1 ? 1.0f : 1e6f);
        buffer.fill_row(r, values.data());
        const InputRows& rows = buffer.rows();
        const auto* data = reinterpret_cast<const int8_t*>(rows.data + r * rows.row_bytes);
        const auto back = input_row(rows, r);
        const int64_t group = form == InputForm::kInt16Token ? inputs : 32;
        for (int64_t begin = 0, g = 0; begin < inputs; begin += group, ++g) {
          const int64_t at = form == InputForm::kInt16Token ? r : r * rows.scale_stride + g;
          const bool is_token = form == InputForm::kInt16Token;
          const int8_t* low = is_token ? data + rows.row_bytes / 2 : nullptr;
          int sum = 0, half = 0, low_sum = 0;
          float largest = 0;
          for (int64_t k = begin; k < std::min(inputs, begin + group); ++k) {
            largest = std::max(largest, std::abs(values[k]));
            ASSERT_LE(std::abs(back[k] - values[k]), rows.scales[at] * 0.5001);
            ASSERT_GE(data[k], -127);
            sum += data[k];
            if (is_token) {
              ASSERT_LE(std::abs(low[k] + 0.5), 64);
              low_sum += low[k];
            }
            if (k < begin + 16) half += data[k];
          }
          ASSERT_FLOAT_EQ(rows.scales[at], largest / (is_token ? 127 * 128 + 63 : 127));
          ASSERT_EQ(rows.negative_sums[is_token ? 2 * at : at], -sum);
          if (is_token) {
            ASSERT_EQ(rows.negative_sums[2 * at + 1], -low_sum);
          }
          if (form == InputForm::kInt8Group) {
            ASSERT_FLOAT_EQ(rows.sums[at], rows.scales[at] * static_cast<float>(sum));
            ASSERT_EQ(rows.negative_half_sums[2 * at], -half);
            ASSERT_EQ(rows.negative_half_sums[2 * at + 1], half - sum);
          }
        }
        for (int64_t k = inputs; k < (inputs + 127) / 128 * 128; ++k) {
          ASSERT_EQ(data[k], 0);
          if (form == InputForm::kInt16Token) {
            ASSERT_EQ(data[rows.row_bytes / 2 + k], 0);
          }
        }
      }
    }
  }
}

// Squared error of one group by plain rounding: the largest magnitude is the last step; minimum: the range has 15
// steps.
double plain_error(const MatrixShape& shape, const float* w, int64_t count) {
  const auto [low, high] = std::minmax_element(w, w + count);
  const bool int8 = shape.format != WeightFormat::kInt4Group;
  float scale = std::max(-*low, *high) / (int8 ? 127 : 7), minimum = 0;
  if (shape.has_minimum) {
    scale = (*high - *low) / 15;
    minimum = through_float16(*low);
  }
  if (shape.format != WeightFormat::kInt8) scale = through_float16(scale);
  if (scale == 0) scale = 1;
  const float first = shape.has_minimum ? 0 : int8 ? -127 : -8, last = shape.has_minimum ? 15 : int8 ? 127 : 7;
  double error = 0;
  for (int64_t k = 0; k < count; ++k) {
    const double q = std::clamp(std::nearbyint((w[k] - minimum) / scale), first, last);
    error += std::pow(w[k] - (scale * q + minimum), 2);
  }
  return error;
}

// The rule of GGUF's Q4_0: the value of largest magnitude becomes -8, the others are rounded half up.
double q4_0_error(const float* w, int64_t count) {
  float extreme = 0;
  for (int64_t k = 0; k < count; ++k) extreme = std::abs(w[k]) > std::abs(extreme) ? w[k] : extreme;
  const float scale = extreme / -8, inverse = scale ? 1 / scale : 0, stored = through_float16(scale);
  double error = 0;
  for (int64_t k = 0; k < count; ++k) {
    const int q = std::min(15, static_cast<int>(w[k] * inverse + 8.5f));
    error += std::pow(w[k] - stored * (q - 8), 2);
  }
  return error;
}

double packed_error(const Packed& packed, const std::vector<float>& weights, int64_t row, int64_t begin,
                    int64_t count) {
  const auto back = packed.row(row);
  double error = 0;
  for (int64_t k = begin; k < begin + count; ++k) {
    error += std::pow(weights[row * packed.matrix.shape.num_inputs + k] - back[k], 2);
  }
  return error;
}

TEST(IntPack, ErrorOfEveryGroupIsAtMostThatOfPlainRounding) {
  std::mt19937 random(6);
  for (const float offset : {0.0f, 0.8f}) {
    for (const MatrixShape& shape : all_formats(37, 330)) {
      auto weights = normal_values(random, shape.num_outputs * shape.num_inputs, 0.05f);
      for (size_t i = 0; i < weights.size(); ++i) weights[i] = i % 97 ? weights[i] + offset * 0.1f : weights[i] * 6;
      const Packed packed(shape, weights.data());
      const int64_t group = shape.group_size ? shape.group_size : shape.num_inputs;
      double total = 0, plain_total = 0;
      for (int64_t n = 0; n < shape.num_outputs; ++n) {
        for (int64_t begin = 0; begin < shape.num_inputs; begin += group) {
          const int64_t count = std::min(group, shape.num_inputs - begin);
          const double plain = plain_error(shape, weights.data() + n * shape.num_inputs + begin, count);
          const double error = packed_error(packed, weights, n, begin, count);
          ASSERT_LE(error, plain * 1.0001 + 1e-12) << text(shape) << " row " << n << " from " << begin;
          total += error;
          plain_total += plain;
        }
      }
      EXPECT_LT(total, plain_total) << text(shape);
    }
  }
}

TEST(IntPack, Int4OfNormalWeightsHasLessErrorThanQ4_0) {
  std::mt19937 random(7);
  const MatrixShape shape{WeightFormat::kInt4Group, 64, 2048, 32};
  const auto weights = normal_values(random, shape.num_outputs * shape.num_inputs, 0.03f);
  const Packed packed(shape, weights.data());
  double error = 0, rule = 0;
  for (int64_t n = 0; n < shape.num_outputs; ++n) {
    error += packed_error(packed, weights, n, 0, shape.num_inputs);
    for (int64_t k = 0; k < shape.num_inputs; k += 32) rule += q4_0_error(&weights[n * shape.num_inputs + k], 32);
  }
  RecordProperty("error_by_q4_0", std::to_string(error / rule));
  EXPECT_LT(error, 0.9 * rule) << error / rule;
}

TEST(IntPack, ImportantInputsGetLessError) {
  std::mt19937 random(8);
  for (const MatrixShape& shape : all_formats(32, 512)) {
    const auto weights = normal_values(random, shape.num_outputs * shape.num_inputs);
    std::vector<float> importance(shape.num_inputs);
    for (size_t k = 0; k < importance.size(); ++k) importance[k] = k % 4 ? 0.01f : 1.0f;
    const Packed plain(shape, weights.data()), weighted(shape, weights.data(), importance.data());
    double plain_error = 0, weighted_error = 0;
    for (int64_t n = 0; n < shape.num_outputs; ++n) {
      for (int64_t k = 0; k < shape.num_inputs; k += 4) {
        plain_error += packed_error(plain, weights, n, k, 1);
        weighted_error += packed_error(weighted, weights, n, k, 1);
      }
    }
    EXPECT_LT(weighted_error, plain_error) << text(shape);
  }
}

TEST(IntPack, ZerosStayZerosAndTinyOrHugeWeightsStayFinite) {
  for (const MatrixShape& shape : all_formats(16, 96)) {
    for (const float value : {0.0f, 1e-30f, 1e-6f, 1e9f, -1e12f}) {
      const std::vector<float> weights(shape.num_outputs * shape.num_inputs, value);
      const Packed packed(shape, weights.data());
      for (const float w : packed.row(7)) {
        ASSERT_TRUE(std::isfinite(w)) << text(shape) << " " << value;
        if (value == 0) {
          ASSERT_EQ(w, 0.0f) << text(shape);
        }
      }
    }
  }
}

TEST(IntPack, SourceTypeAndStrideDoNotMatter) {
  const int64_t inputs = 75;
  std::mt19937 random(9);
  std::vector<float> plain(kPanelWidth * inputs), transposed(plain.size());
  std::vector<uint16_t> bf16(plain.size()), fp16(plain.size());
  for (int64_t i = 0; i < kPanelWidth * inputs; ++i) {
    // Whole numbers of few bits are exact in every type.
    plain[i] = static_cast<float>(std::uniform_int_distribution<int>(-120, 120)(random));
    transposed[i % inputs * kPanelWidth + i / inputs] = plain[i];
    uint32_t bits;
    std::memcpy(&bits, &plain[i], 4);
    bf16[i] = static_cast<uint16_t>(bits >> 16);
    const _Float16 half = static_cast<_Float16>(plain[i]);
    std::memcpy(&fp16[i], &half, 2);
  }
  for (const MatrixShape& shape : all_formats(kPanelWidth, inputs)) {
    SourceRows rows[4];
    rows[1].element_stride = kPanelWidth;
    rows[2].type = SourceType::kBFloat16;
    rows[3].type = SourceType::kFloat16;
    for (int64_t n = 0; n < kPanelWidth; ++n) {
      rows[0].rows[n] = plain.data() + n * inputs;
      rows[1].rows[n] = transposed.data() + n;
      rows[2].rows[n] = bf16.data() + n * inputs;
      rows[3].rows[n] = fp16.data() + n * inputs;
    }
    std::vector<std::byte> first(panel_bytes(shape)), other(panel_bytes(shape));
    pack_panel(shape, rows[0], first.data());
    for (int i = 1; i < 4; ++i) {
      pack_panel(shape, rows[i], other.data());
      ASSERT_EQ(first, other) << text(shape) << " source " << i;
    }
  }
}

TEST(QuantizedPanel, IntegersAndHalfPrecisionParametersComeBackUnchanged) {
  std::mt19937 random(10);
  for (const int64_t inputs : {32, 64, 96, 256, 300}) {
    for (const MatrixShape& shape : all_formats(kPanelWidth, inputs)) {
      if (shape.format == WeightFormat::kInt8) continue;
      const bool int8 = shape.format == WeightFormat::kInt8Group;
      const int64_t num_groups = (inputs + shape.group_size - 1) / shape.group_size;
      std::vector<std::vector<uint8_t>> q(kPanelWidth, std::vector<uint8_t>(inputs));
      std::vector<std::vector<float>> scales, minimums;
      QuantizedRows source;
      for (int c = 0; c < kPanelWidth; ++c) {
        for (auto& value : q[c])
          value = static_cast<uint8_t>(std::uniform_int_distribution<int>(0, int8 ? 255 : 15)(random));
        scales.push_back(normal_values(random, num_groups));
        minimums.push_back(normal_values(random, num_groups));
        for (float& x : scales.back()) x = through_float16(x);
        for (float& x : minimums.back()) x = through_float16(x);
      }
      for (int c = 0; c < kPanelWidth; ++c) {
        if (c == 5) continue;  // a null row
        source.values[c] = q[c].data();
        source.scales[c] = scales[c].data();
        source.minimums[c] = shape.has_minimum ? minimums[c].data() : nullptr;
      }
      const Packed packed(shape);
      pack_quantized_panel(shape, source, packed.memory.get());
      for (int c = 0; c < kPanelWidth; ++c) {
        const auto row = packed.row(c);
        for (int64_t k = 0; k < inputs; ++k) {
          const int64_t g = k / shape.group_size;
          const int value = int8 ? static_cast<int8_t>(q[c][k]) : q[c][k] - (shape.has_minimum ? 0 : 8);
          const float want = scales[c][g] * static_cast<float>(value) + (shape.has_minimum ? minimums[c][g] : 0.0f);
          ASSERT_EQ(row[k], c == 5 ? 0.0f : want) << text(shape) << " column " << c << " k " << k;
        }
      }
      check_products(packed, 3, random);
      check_products(packed, 19, random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(QuantizedPanel, RefusesWhatItCannotStore) {
  std::byte panel[64];
  EXPECT_THROW(pack_quantized_panel({WeightFormat::kInt8, 16, 64}, {}, panel), std::invalid_argument);
  EXPECT_THROW(pack_quantized_panel({WeightFormat::kInt8Group, 16, 64, 32, true}, {}, panel), std::invalid_argument);
  EXPECT_THROW(pack_quantized_panel({WeightFormat::kInt4Group, 16, 64, 16}, {}, panel), std::invalid_argument);
}

TEST(IntPack, RefusesWhatNoKernelReads) {
  std::byte panel[64];
  EXPECT_THROW(pack_panel({WeightFormat::kInt8, 16, 64, 32}, {}, panel), std::invalid_argument);
  EXPECT_THROW(pack_panel({WeightFormat::kInt8, 16, 1 << 20}, {}, panel), std::invalid_argument);
  EXPECT_THROW(pack_panel({WeightFormat::kInt8Group, 16, 64, 48}, {}, panel), std::invalid_argument);
}

}  // namespace
}  // namespace llmopt
