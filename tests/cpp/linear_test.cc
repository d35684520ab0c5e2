// Against a plain loop in double, with the instruction set that LLMOPT_ISA names. Matrices and outputs have exactly the
// size they must have, so that the address sanitizer sees a read or write past them.
#include "llmopt/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "llmopt/isa.h"

namespace llmopt {
namespace {

uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

std::vector<float> random_values(std::mt19937& random, int64_t count, float deviation = 1.0f) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// A packed matrix in memory of exactly its size.
class Packed {
 public:
  Packed(const MatrixShape& shape, const float* weights, int64_t element_stride = 1, int64_t row_stride = 0)
      : memory_(static_cast<std::byte*>(std::aligned_alloc(64, packed_bytes(shape))), std::free) {
    matrix.shape = shape;
    matrix.data = memory_.get();
    if (row_stride == 0) row_stride = shape.num_inputs;
    std::memset(memory_.get(), 0xff, packed_bytes(shape));  // NaN: nothing may stay unwritten
    for (int64_t panel = 0; panel < shape.num_panels(); ++panel) {
      SourceRows source;
      source.element_stride = element_stride;
      for (int i = 0; i < kPanelWidth && panel * kPanelWidth + i < shape.num_outputs; ++i) {
        source.rows[i] = weights + (panel * kPanelWidth + i) * row_stride;
      }
      pack_panel(shape, source, memory_.get() + panel * panel_bytes(shape));
    }
  }
  PackedMatrix matrix;

 private:
  std::unique_ptr<std::byte, decltype(&std::free)> memory_;
};

double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGelu:
      return x * 0.5 * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::kGeluTanh:
      return x * 0.5 * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
    case Activation::kRelu:
      return x > 0 ? x : 0;
    case Activation::kReluSquared:
      return x > 0 ? x * x : 0;
  }
  return 0;
}

using Kind = LinearOutput::Kind;

struct Case {
  WeightFormat format = WeightFormat::kFloat32;
  int64_t rows = 1, inputs = 64, outputs = 48;
  Kind kind = Kind::kStore;
  DType dtype = DType::kFloat32;
  Activation activation = Activation::kNone;
  bool has_bias = false;
  float scale = 1;
  int shares = 1;  // the panels are computed in so many calls
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << name(c.format) << " rows " << c.rows << " inputs " << c.inputs << " outputs " << c.outputs << " kind "
             << static_cast<int>(c.kind) << " dtype " << name(c.dtype) << " activation "
             << static_cast<int>(c.activation) << " bias " << c.has_bias << " shares " << c.shares;
}

// Runs a case and compares every output; returns the outputs.
std::vector<float> check(const Case& c, uint32_t seed) {
  std::mt19937 random(seed);
  const MatrixShape shape{c.format, c.outputs, c.inputs};
  const auto weights = random_values(random, c.outputs * c.inputs);
  const auto values = random_values(random, c.rows * c.inputs, 1 / std::sqrt(static_cast<float>(c.inputs)));
  const auto bias = random_values(random, c.outputs);
  const int64_t width = c.kind == Kind::kGated ? c.outputs / 2 : c.outputs;
  const auto before = random_values(random, c.rows * width);
  const Packed packed(shape, weights.data());

  InputBuffer buffer;
  const InputForm form = input_form(shape, c.rows);
  buffer.resize(form, c.rows, c.inputs);
  for (int64_t r = 0; r < c.rows; ++r) {
    const std::vector<float> row(values.begin() + r * c.inputs, values.begin() + (r + 1) * c.inputs);
    buffer.fill_row(r, row.data());
  }

  const size_t count = c.rows * width;
  const std::unique_ptr<char[]> out(new char[count * item_size(c.dtype)]);
  for (size_t i = 0; i < count; ++i) {
    const uint16_t half = to_bfloat16(before[i]);
    std::memcpy(out.get() + i * item_size(c.dtype),
                c.dtype == DType::kFloat32 ? static_cast<const void*>(&before[i]) : &half, item_size(c.dtype));
  }
  LinearOutput output;
  output.kind = c.kind;
  output.dtype = c.dtype;
  output.out = out.get();
  output.row_stride = width;
  output.bias = c.has_bias ? bias.data() : nullptr;
  output.activation = c.activation;
  output.scale = c.scale;
  LinearScratch scratch;
  const int64_t step = c.kind == Kind::kGated ? 2 : 1, units = shape.num_panels() / step;
  {
    const TileScope tiles;
    for (int share = 0; share < c.shares; ++share) {
      const int64_t begin = units * share / c.shares * step, end = units * (share + 1) / c.shares * step;
      prefetch_panels(packed.matrix, begin, end);
      linear(packed.matrix, buffer.rows(), output, begin, end, scratch);
    }
  }

  const auto rounded = [](float x, bool round) { return round ? from_bfloat16(to_bfloat16(x)) : x; };
  std::vector<float> results(count);
  for (int64_t r = 0; r < c.rows; ++r) {
    const auto product = [&](int64_t column) {
      double sum = 0;
      for (int64_t k = 0; k < c.inputs; ++k) {
        sum += static_cast<double>(rounded(values[r * c.inputs + k], form == InputForm::kBFloat16)) *
               rounded(weights[column * c.inputs + k], c.format == WeightFormat::kBFloat16);
      }
      return sum + (c.has_bias ? bias[column] : 0.0);
    };
    for (int64_t i = 0; i < width; ++i) {
      double want;
      if (c.kind == Kind::kGated) {
        const int64_t gate = i / kPanelWidth * 2 * kPanelWidth + i % kPanelWidth;
        want = activate(c.activation, product(gate)) * product(gate + kPanelWidth) * c.scale;
      } else {
        want = activate(c.activation, product(i)) * c.scale;
      }
      if (c.kind == Kind::kAdd) want += before[r * width + i];
      float got;
      if (c.dtype == DType::kFloat32) {
        std::memcpy(&got, out.get() + (r * width + i) * 4, 4);
      } else {
        uint16_t half;
        std::memcpy(&half, out.get() + (r * width + i) * 2, 2);
        got = from_bfloat16(half);
      }
      results[r * width + i] = got;
      // Sums of values near 1 in float32; a bfloat16 output is rounded to 8 bits.
      const double bound = (c.dtype == DType::kFloat32 ? 1e-5 : 4e-3) * (1 + std::abs(want));
      if (!(std::abs(got - want) <= bound)) {
        ADD_FAILURE() << c << ": row " << r << " column " << i << " is " << got << ", must be " << want;
        return results;
      }
    }
  }
  return results;
}

constexpr WeightFormat kDense[] = {WeightFormat::kFloat32, WeightFormat::kBFloat16};

TEST(Linear, EqualsPlainLoopForEveryNumberOfRows) {
  for (WeightFormat format : kDense) {
    for (int64_t rows = 1; rows <= 70; rows += rows < 36 ? 1 : 17) check({format, rows, 100, 40}, rows);
  }
}

TEST(Linear, EqualsPlainLoopForRandomShapes) {
  std::mt19937 random(7);
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 300; ++i) {
    Case c;
    c.format = kDense[pick(0, 1)];
    c.rows = pick(0, 2) ? pick(1, 20) : pick(1, 150);
    c.inputs = pick(0, 4) ? pick(1, 300) : pick(300, 2500);
    c.outputs = pick(1, 200);
    c.kind = static_cast<Kind>(pick(0, 2));
    c.dtype = c.kind != Kind::kAdd && pick(0, 1) ? DType::kBFloat16 : DType::kFloat32;
    if (c.kind == Kind::kGated) c.outputs = (c.outputs + 31) / 32 * 32;
    c.activation = static_cast<Activation>(pick(0, 5));
    c.has_bias = pick(0, 1);
    c.scale = pick(0, 1) ? 1.0f : 0.75f;
    c.shares = pick(1, 3);
    check(c, i);
    if (HasFailure()) return;
  }
}

TEST(Linear, EqualsPlainLoopForManyRowsAndDeepMatrices) {
  for (WeightFormat format : kDense) {
    check({format, 300, 2000, 96, Kind::kAdd, DType::kFloat32, Activation::kNone, true}, 1);
    check({format, 129, 3100, 320, Kind::kGated, DType::kBFloat16, Activation::kSilu}, 2);
    check({format, 33, 8960, 32}, 3);
  }
}

TEST(Linear, RowDoesNotDependOnTheOtherRows) {
  for (WeightFormat format : kDense) {
    std::mt19937 random(3);
    const MatrixShape shape{format, 80, 1100};
    const auto weights = random_values(random, shape.num_outputs * shape.num_inputs);
    const auto values = random_values(random, 64 * shape.num_inputs);
    const Packed packed(shape, weights.data());
    // Numbers of rows that run the same kernel: from the threshold of the tiles on.
    const int64_t first = format == WeightFormat::kBFloat16 ? linear_tuning().tile_rows_bf16 : 1;
    std::vector<float> alone;
    for (int64_t rows = first; rows <= 64; ++rows) {
      InputBuffer buffer;
      buffer.resize(input_form(shape, rows), rows, shape.num_inputs);
      for (int64_t r = 0; r < rows; ++r) buffer.fill_row(r, values.data() + (rows - 1 - r) * shape.num_inputs);
      std::vector<float> out(rows * shape.num_outputs);
      LinearOutput output;
      output.out = out.data();
      output.row_stride = shape.num_outputs;
      LinearScratch scratch;
      const TileScope tiles;
      linear(packed.matrix, buffer.rows(), output, 0, shape.num_panels(), scratch);
      const std::vector<float> last(out.end() - shape.num_outputs, out.end());
      if (alone.empty()) alone = last;
      ASSERT_EQ(alone, last) << name(format) << " with " << rows << " rows";
    }
  }
}

TEST(Linear, ActivationsKeepFarValuesAndNaN) {
  for (Activation activation : {Activation::kNone, Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
                                Activation::kRelu, Activation::kReluSquared}) {
    const std::vector<float> xs = {0,    -0.0f, 1e-6f, -1e-6f, 0.5f, -0.5f, 3,    -3,
                                   9.5f, -9.5f, 50,    -50,    300,  -300,  1e4f, std::nanf("")};
    const MatrixShape shape{WeightFormat::kFloat32, 1, 1};
    const float one = 1;
    const Packed packed(shape, &one);
    InputBuffer buffer;
    buffer.resize(InputForm::kFloat32, static_cast<int64_t>(xs.size()), 1);
    for (size_t i = 0; i < xs.size(); ++i) buffer.fill_row(static_cast<int64_t>(i), &xs[i]);
    std::vector<float> out(xs.size());
    LinearOutput output;
    output.out = out.data();
    output.row_stride = 1;
    output.activation = activation;
    LinearScratch scratch;
    linear(packed.matrix, buffer.rows(), output, 0, 1, scratch);
    for (size_t i = 0; i + 1 < xs.size(); ++i) {
      const double want = activate(activation, xs[i]);
      EXPECT_NEAR(out[i], want, 2e-6 * std::abs(want) + 1e-6)
          << "activation " << static_cast<int>(activation) << " of " << xs[i];
    }
    EXPECT_TRUE(std::isnan(out.back())) << static_cast<int>(activation);
  }
}

TEST(Pack, RowsComeBack) {
  std::mt19937 random(5);
  for (WeightFormat format : kDense) {
    for (int64_t inputs : {1, 31, 32, 33, 100}) {
      const MatrixShape shape{format, 37, inputs};
      const auto weights = random_values(random, shape.num_outputs * inputs);
      const Packed packed(shape, weights.data());
      const std::unique_ptr<float[]> row(new float[inputs]);
      for (int64_t n = 0; n < shape.num_outputs; ++n) {
        unpack_row(packed.matrix, n, row.get());
        for (int64_t k = 0; k < inputs; ++k) {
          const float w = weights[n * inputs + k];
          ASSERT_EQ(row[k], format == WeightFormat::kFloat32 ? w : from_bfloat16(to_bfloat16(w)));
        }
      }
    }
  }
}

TEST(Pack, ReadsTransposedAndHalfPrecisionSources) {
  const int64_t inputs = 37;
  const MatrixShape shape{WeightFormat::kBFloat16, kPanelWidth, inputs};
  // Whole numbers of few bits are exact in every type.
  const auto value = [](int64_t n, int64_t k) { return static_cast<float>((n * 7 + k * 3) % 61 - 30) / 4; };
  std::vector<float> transposed(inputs * kPanelWidth);
  std::vector<uint16_t> bf16(inputs * kPanelWidth), fp16(inputs * kPanelWidth);
  for (int64_t n = 0; n < kPanelWidth; ++n) {
    for (int64_t k = 0; k < inputs; ++k) {
      transposed[k * kPanelWidth + n] = value(n, k);
      bf16[n * inputs + k] = to_bfloat16(value(n, k));
      const _Float16 half = static_cast<_Float16>(value(n, k));
      std::memcpy(&fp16[n * inputs + k], &half, 2);
    }
  }
  SourceRows by_column, from_bf16, from_fp16;
  by_column.element_stride = kPanelWidth;
  from_bf16.type = SourceType::kBFloat16;
  from_fp16.type = SourceType::kFloat16;
  for (int64_t n = 0; n < kPanelWidth; ++n) {
    by_column.rows[n] = transposed.data() + n;
    from_bf16.rows[n] = bf16.data() + n * inputs;
    from_fp16.rows[n] = fp16.data() + n * inputs;
  }
  std::vector<float> row(inputs);
  for (const SourceRows& source : {by_column, from_bf16, from_fp16}) {
    std::vector<std::byte> panel(panel_bytes(shape));
    pack_panel(shape, source, panel.data());
    for (int64_t n = 0; n < kPanelWidth; ++n) {
      unpack_row({shape, panel.data()}, n, row.data());
      for (int64_t k = 0; k < inputs; ++k) ASSERT_EQ(row[k], value(n, k)) << n << " " << k;
    }
  }
}

TEST(Pack, RefusesWhatNoKernelReads) {
  EXPECT_THROW(panel_bytes({WeightFormat::kInt4Group, 16, 64, 48}), std::invalid_argument);
  EXPECT_THROW(panel_bytes({WeightFormat::kFloat32, 16, 64, 32}), std::invalid_argument);
  std::byte panel[64];
  EXPECT_THROW(pack_panel({WeightFormat::kFloat32, 16, 0}, {}, panel), std::invalid_argument);
}

}  // namespace
}  // namespace llmopt

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    std::cout << "instruction set: " << llmopt::name(llmopt::selected_isa()) << std::endl;
  } catch (const std::exception& error) {
    const char* isa = std::getenv("LLMOPT_ISA");
    std::cout << "this machine has no " << (isa ? isa : "?") << ": " << error.what() << std::endl;
    return 0;
  }
  return RUN_ALL_TESTS();
}
