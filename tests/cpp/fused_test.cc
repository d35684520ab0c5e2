// Against plain loops in double, with every instruction set of this machine. Rows have exactly the size they must have,
// so that the address sanitizer sees a read or write past them.
#include "llmopt/fused.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/fused/kernels.h"

namespace llmopt::fused {
namespace {

using Row = std::vector<float>;
using Words = std::vector<uint16_t>;
constexpr int64_t kSizes[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 577};

Row random_row(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  Row row(n);
  for (float& x : row) x = std::normal_distribution<float>(0.25f, 1)(random);
  return row;
}

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

void for_all(const std::function<void(const Kernels&, int64_t)>& test) {
  for (const Isa isa : available_isas()) {
    for (const int64_t n : kSizes) {
      SCOPED_TRACE(std::string(name(isa)) + ", size " + std::to_string(n));
      test(kernels(isa), n);
    }
  }
}

// Values of a tensor in a dtype: what a kernel reads, and what these values are.
struct Values {
  DType dtype;
  Row exact;
  Words words;

  Values(DType dtype, Row row) : dtype(dtype), exact(std::move(row)) {
    if (dtype == DType::kFloat32) return;
    for (float& x : exact) x = from_bfloat16(words.emplace_back(to_bfloat16(x)));
  }
  const void* data() const { return dtype == DType::kFloat32 ? static_cast<const void*>(exact.data()) : words.data(); }
};

// Room for an output, with its values as float32.
struct Output {
  DType dtype;
  Row floats;
  Words words;

  Output(DType dtype, int64_t n)
      : dtype(dtype), floats(dtype == DType::kFloat32 ? n : 0), words(dtype == DType::kFloat32 ? 0 : n) {}
  void* data() { return dtype == DType::kFloat32 ? static_cast<void*>(floats.data()) : words.data(); }
  float operator[](int64_t i) const { return dtype == DType::kFloat32 ? floats[i] : from_bfloat16(words[i]); }
};

void expect_near(float found, double wanted, DType dtype) {
  EXPECT_NEAR(found, wanted, (dtype == DType::kFloat32 ? 2e-5 : 1.0 / 64) * (1 + std::abs(wanted)));
}

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16};

TEST(Fused, RmsNormEqualsTheFormula) {
  for_all([](const Kernels& kernels, int64_t n) {
    for (const DType dtype : kTypes) {
      for (const bool adds_one : {false, true}) {
        const Values x(dtype, random_row(3 * n, 1)), weight(dtype, random_row(n, 2));
        Output out(dtype, 3 * n);
        kernels.rms_norm({dtype, x.data(), n, weight.data(), out.data(), 3, n, 1e-3f, adds_one, false}, 0, 3);
        for (int64_t row = 0; row < 3; ++row) {
          double squares = 0;
          for (int64_t i = 0; i < n; ++i) squares += std::pow(x.exact[row * n + i], 2);
          for (int64_t i = 0; i < n; ++i) {
            const double factor = weight.exact[i] + (adds_one ? 1.0 : 0.0);
            expect_near(out[row * n + i], x.exact[row * n + i] / std::sqrt(squares / n + 1e-3) * factor, dtype);
          }
        }
      }
    }
  });
}

TEST(Fused, GatedActivationsEqualTheFormulas) {
  for_all([](const Kernels& kernels, int64_t n) {
    for (const DType dtype : kTypes) {
      const Values both(dtype, random_row(4 * n, 3));  // two rows of gate and up
      for (const auto activation : {GateActivation::kSilu, GateActivation::kGelu, GateActivation::kGeluTanh}) {
        Output out(dtype, 2 * n);
        const auto* gate = static_cast<const char*>(both.data());
        kernels.gated_activation({dtype, activation, gate, 2 * n, gate + n * item_size(dtype), 2 * n, out.data(), 2, n},
                                 0, 2);
        for (int64_t i = 0; i < 2 * n; ++i) {
          const double g = both.exact[i / n * 2 * n + i % n], up = both.exact[i / n * 2 * n + n + i % n];
          double act = g / (1 + std::exp(-g));
          if (activation == GateActivation::kGelu) act = g * 0.5 * (1 + std::erf(g / std::sqrt(2.0)));
          if (activation == GateActivation::kGeluTanh) {
            act = 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
          }
          expect_near(out[i], act * up, dtype);
        }
      }
    }
  });
}

TEST(Fused, RotationsTurnPairsAndCopyTheRest) {
  for_all([](const Kernels& kernels, int64_t half) {
    for (const DType dtype : kTypes) {
      for (const bool interleaved : {false, true}) {
        const int64_t tokens = 2, heads = 2, turned = 2 * half, dim = turned + 3;
        const Values x(dtype, random_row(tokens * heads * dim, 4));
        const Values cos(dtype, random_row(tokens * turned, 5)), sin(dtype, random_row(tokens * turned, 6));
        Output out(dtype, tokens * heads * dim);
        kernels.rotate({dtype, x.data(), tokens * heads * dim, heads * dim, dim, cos.data(), sin.data(),
                        tokens * turned, turned, out.data(), 1, tokens, heads, dim, turned, interleaved, false},
                       0, tokens);
        for (int64_t place = 0; place < tokens * heads * dim; ++place) {
          const int64_t i = place % dim, token = place / dim / heads, start = place - i;
          if (i >= turned) {
            EXPECT_EQ(out[place], x.exact[place]);
            continue;
          }
          const bool is_first = interleaved ? i % 2 == 0 : i < half;
          const int64_t other = interleaved ? i ^ 1 : (i + half) % turned;
          const double paired = (is_first ? -1.0 : 1.0) * x.exact[start + other];
          const double c = cos.exact[token * turned + i], s = sin.exact[token * turned + i];
          // a sum of two products may be small beside them
          const double scale = std::abs(x.exact[place] * c) + std::abs(paired * s);
          EXPECT_NEAR(out[place], x.exact[place] * c + paired * s,
                      (dtype == DType::kFloat32 ? 2e-5 : 1.0 / 64) * (1 + scale));
        }
      }
    }
  });
}

TEST(Fused, FewRowsLinearEqualsALoop) {
  for_all([](const Kernels& kernels, int64_t inputs) {
    for (const DType dtype : kTypes) {
      for (const int64_t rows : {1, 2, 3, 4, 7}) {
        for (const int64_t outputs : {1, 5, 37}) {
          const Values x(dtype, random_row(rows * inputs, 7)), weight(dtype, random_row(outputs * inputs, 8));
          const Values bias(dtype, random_row(outputs, 9));
          Output out(dtype, rows * outputs);
          kernels.few_rows_linear(
              {dtype, x.data(), inputs, weight.data(), inputs, bias.data(), out.data(), rows, inputs, outputs}, 0,
              outputs);
          for (int64_t i = 0; i < rows * outputs; ++i) {
            double sum = bias.exact[i % outputs], scale = 0;
            for (int64_t k = 0; k < inputs; ++k) {
              const double product =
                  static_cast<double>(x.exact[i / outputs * inputs + k]) * weight.exact[i % outputs * inputs + k];
              sum += product;
              scale += std::abs(product);
            }
            EXPECT_NEAR(
                out[i], sum,
                dtype == DType::kFloat32 ? 1e-6 * (10 + scale) : 1.0 / 128 * (0.1 + std::abs(sum)) + 1e-6 * scale);
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace llmopt::fused
