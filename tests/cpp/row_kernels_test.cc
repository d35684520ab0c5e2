// Against plain loops in double, with every instruction set of this machine. Rows have exactly the size they must have,
// so that the address sanitizer sees a read or write past them.
#include "core/decoder/row_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace llmopt::decoder {
namespace {

using Row = std::vector<float>;
constexpr int64_t kSizes[] = {1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 48, 64, 65, 100, 576, 577};

Row random_row(int64_t n, uint32_t seed, float mean = 0) {
  std::mt19937 random(seed);
  Row row(n);
  for (float& x : row) x = std::normal_distribution<float>(mean, 1)(random);
  return row;
}

void for_all(const std::function<void(const RowKernels&, int64_t)>& test) {
  for (const Isa isa : available_isas()) {
    for (const int64_t n : kSizes) {
      SCOPED_TRACE(std::string(name(isa)) + ", " + std::to_string(n) + " values");
      test(row_kernels(isa), n);
    }
  }
}

TEST(RowKernels, NormsEqualTheFormula) {
  for_all([](const RowKernels& kernels, int64_t n) {
    const Row x = random_row(n, 1, 0.5f), weight = random_row(n, 2), bias = random_row(n, 3);
    double squares = 0, sum = 0, deviations = 0;
    for (const float v : x) squares += static_cast<double>(v) * v, sum += v;
    for (const float v : x) deviations += (v - sum / n) * (v - sum / n);
    for (const bool has_vectors : {false, true}) {
      Row rms = x, layer(n);
      kernels.rms_norm(rms.data(), n, has_vectors ? weight.data() : nullptr, 1e-3f, rms.data());  // in place
      kernels.layer_norm(x.data(), n, has_vectors ? weight.data() : nullptr, has_vectors ? bias.data() : nullptr, 1e-3f,
                         layer.data());
      for (int64_t i = 0; i < n; ++i) {
        const double w = has_vectors ? weight[i] : 1, b = has_vectors ? bias[i] : 0;
        EXPECT_NEAR(rms[i], x[i] / std::sqrt(squares / n + 1e-3) * w, 1e-5);
        EXPECT_NEAR(layer[i], (x[i] - sum / n) / std::sqrt(deviations / n + 1e-3) * w + b, 2e-5);
      }
    }
  });
}

TEST(RowKernels, TheLargestComeInOrderAndOfEqualOnesTheFirst) {
  for_all([](const RowKernels& kernels, int64_t n) {
    for (const int count : {1, 3, 8}) {
      if (count > n) continue;
      for (uint32_t seed = 0; seed < 4; ++seed) {
        Row x = random_row(n, seed);
        if (seed % 2) {
          for (float& v : x) v = std::round(2 * v);  // many equal ones
        }
        std::vector<int32_t> order(n), places(count);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
        Row values(count);
        kernels.top(x.data(), n, count, places.data(), values.data());
        for (int k = 0; k < count; ++k) {
          EXPECT_EQ(places[k], order[k]);
          EXPECT_EQ(values[k], x[order[k]]);
        }
      }
    }
  });
}

TEST(RowKernels, NanIsNeverAmongTheLargest) {
  for_all([](const RowKernels& kernels, int64_t n) {
    Row x = random_row(n, 9);
    for (int64_t i = 0; i < n; i += 2) x[i] = std::numeric_limits<float>::quiet_NaN();
    int32_t place = -1;
    float value = 0;
    kernels.top(x.data(), n, 1, &place, &value);
    if (n > 1) {
      EXPECT_EQ(place % 2, 1);
      EXPECT_FALSE(std::isnan(value));
    } else {
      EXPECT_EQ(value, -std::numeric_limits<float>::infinity());
    }
  });
}

TEST(RowKernels, SumsOfExponentialsEqualTheFormula) {
  for_all([](const RowKernels& kernels, int64_t n) {
    const Row x = random_row(n, 10);
    const float max = *std::max_element(x.begin(), x.end());
    double sum = 0;
    for (const float v : x) sum += std::exp(static_cast<double>(v) - max);
    EXPECT_NEAR(kernels.sum_exp(x.data(), n, max), sum, 1e-5 * sum);
  });
}

TEST(RowKernels, RotationsTurnPairsAndNothingElse) {
  for_all([](const RowKernels& kernels, int64_t half) {
    const Row x = random_row(2 * half + 3, 4), cos = random_row(half, 5), sin = random_row(half, 6);
    Row halves = x, pairs = x;
    kernels.rotate(halves.data(), half, cos.data(), sin.data());
    kernels.rotate_interleaved(pairs.data(), half, cos.data(), sin.data());
    for (int64_t i = 0; i < half; ++i) {
      EXPECT_NEAR(halves[i], x[i] * cos[i] - x[half + i] * sin[i], 1e-5);
      EXPECT_NEAR(halves[half + i], x[half + i] * cos[i] + x[i] * sin[i], 1e-5);
      EXPECT_NEAR(pairs[2 * i], x[2 * i] * cos[i] - x[2 * i + 1] * sin[i], 1e-5);
      EXPECT_NEAR(pairs[2 * i + 1], x[2 * i + 1] * cos[i] + x[2 * i] * sin[i], 1e-5);
    }
    for (int64_t i = 2 * half; i < 2 * half + 3; ++i) EXPECT_TRUE(halves[i] == x[i] && pairs[i] == x[i]);
  });
}

TEST(RowKernels, ScaleAddAndSoftcapEqualTheFormula) {
  for_all([](const RowKernels& kernels, int64_t n) {
    const Row x = random_row(n, 7), y = random_row(n, 8);
    Row scaled = x, sum = x, capped = x;
    capped[n / 2] = 1e6f;
    kernels.scale(scaled.data(), n, 1.5f);
    kernels.add(sum.data(), n, y.data(), -0.25f);
    kernels.softcap(capped.data(), n, 0.7f);
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_EQ(scaled[i], x[i] * 1.5f);
      EXPECT_NEAR(sum[i], x[i] - 0.25 * y[i], 1e-6);
      EXPECT_NEAR(capped[i], i == n / 2 ? 0.7 : std::tanh(x[i] / 0.7) * 0.7, 1e-6);
    }
  });
}

TEST(RowKernels, BFloat16IsRoundedToTheNearestAndComesBack) {
  for_all([](const RowKernels& kernels, int64_t n) {
    const Row x = random_row(n, 9);
    std::vector<uint16_t> halves(n);
    Row back(n);
    kernels.to_bfloat16(x.data(), n, halves.data());
    kernels.from_bfloat16(halves.data(), n, back.data());
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits;
      std::memcpy(&bits, &x[i], 4);
      EXPECT_EQ(halves[i], static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
      bits = static_cast<uint32_t>(halves[i]) << 16;
      float expected;
      std::memcpy(&expected, &bits, 4);
      EXPECT_EQ(back[i], expected);
    }
  });
}

}  // namespace
}  // namespace llmopt::decoder
