// The row kernels of one instruction set. Included by sources that differ only in their compiler flags.
#pragma once

#include <cmath>

#include "core/decoder/row_kernels.h"
#include "core/simd.h"

namespace llmopt::decoder {
namespace {

using simd::HalfVec;
using simd::kLanes;
using simd::Vec;

// The next lanes of a row that has `left` values to go.
LLMOPT_INLINE Vec load_some(const float* from, int64_t left) {
  return left >= kLanes ? simd::load_as<Vec>(from) : simd::load_first<Vec>(from, static_cast<int>(left));
}
LLMOPT_INLINE void store_some(float* to, Vec v, int64_t left) {
  if (left >= kLanes) {
    simd::store(to, v);
  } else {
    std::memcpy(to, &v, static_cast<size_t>(left) * sizeof(float));
  }
}

// Sum of f(lanes) over a row, where f gives zero for the lanes past its end.
template <class F>
LLMOPT_INLINE float sum_row(int64_t n, const F& f) {
  Vec sums[4] = {};  // apart, so that one addition need not wait for the last
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sums[j] += f(i + j * kLanes, n);
  }
  for (; i < n; i += kLanes) sums[0] += f(i, n);
  return simd::sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void rms_norm(const float* x, int64_t n, const float* weight, float epsilon, float* out) {
  const float squares = sum_row(n, [&](int64_t i, int64_t end) {
    const Vec v = load_some(x + i, end - i);
    return v * v;
  });
  const Vec factor = simd::splat(1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon));
  for (int64_t i = 0; i < n; i += kLanes) {
    Vec v = load_some(x + i, n - i) * factor;
    if (weight) v *= load_some(weight + i, n - i);
    store_some(out + i, v, n - i);
  }
}

void layer_norm(const float* x, int64_t n, const float* weight, const float* bias, float epsilon, float* out) {
  const float sum = sum_row(n, [&](int64_t i, int64_t end) { return load_some(x + i, end - i); });
  const Vec mean = simd::splat(sum / static_cast<float>(n));
  const float squares = sum_row(n, [&](int64_t i, int64_t end) {
    Vec v = load_some(x + i, end - i) - mean;
    if (end - i < kLanes) v = simd::load_first<Vec>(reinterpret_cast<const float*>(&v), static_cast<int>(end - i));
    return v * v;
  });
  const Vec factor = simd::splat(1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon));
  for (int64_t i = 0; i < n; i += kLanes) {
    Vec v = (load_some(x + i, n - i) - mean) * factor;
    if (weight) v *= load_some(weight + i, n - i);
    if (bias) v += load_some(bias + i, n - i);
    store_some(out + i, v, n - i);
  }
}

void rotate(float* x, int64_t half, const float* cos, const float* sin) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const Vec c = load_some(cos + i, left), s = load_some(sin + i, left);
    const Vec a = load_some(x + i, left), b = load_some(x + half + i, left);
    store_some(x + i, a * c - b * s, left);
    store_some(x + half + i, b * c + a * s, left);
  }
}

void rotate_interleaved(float* x, int64_t half, const float* cos, const float* sin) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

void scale(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += kLanes) store_some(x + i, load_some(x + i, n - i) * simd::splat(factor), n - i);
}

void add(float* x, int64_t n, const float* y, float factor) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store_some(x + i, load_some(x + i, n - i) + load_some(y + i, n - i) * simd::splat(factor), n - i);
  }
}

void softcap(float* x, int64_t n, float cap) {
  const Vec inverse = simd::splat(1.0f / cap), outer = simd::splat(cap);
  for (int64_t i = 0; i < n; i += kLanes) {
    store_some(x + i, simd::tanh(load_some(x + i, n - i) * inverse) * outer, n - i);
  }
}

void to_bfloat16(const float* x, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const HalfVec v = simd::to_bfloat16(load_some(x + i, n - i));
    if (n - i >= kLanes) {
      simd::store(out + i, v);
    } else {
      std::memcpy(out + i, &v, static_cast<size_t>(n - i) * sizeof(uint16_t));
    }
  }
}

void from_bfloat16(const uint16_t* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const HalfVec v =
        n - i >= kLanes ? simd::load_as<HalfVec>(x + i) : simd::load_first<HalfVec>(x + i, static_cast<int>(n - i));
    store_some(out + i, simd::from_bfloat16(v), n - i);
  }
}

void top(const float* x, int64_t n, int count, int32_t* places, float* values) {
  constexpr float kLowest = -__builtin_inff();
  for (int k = 0; k < count; ++k) places[k] = k, values[k] = kLowest;
  int found = 0;
  const auto insert = [&](int64_t i) {
    int k = found < count ? found++ : count - 1;
    for (; k > 0 && x[i] > values[k - 1]; --k) places[k] = places[k - 1], values[k] = values[k - 1];
    places[k] = static_cast<int32_t>(i);
    values[k] = x[i];
  };
  constexpr int64_t kBlock = 8 * kLanes;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    if (found == count && end - begin == kBlock) {  // is anything in these larger than the smallest so far?
      Vec largest = simd::load_as<Vec>(x + begin);
#pragma GCC unroll 7
      for (int j = 1; j < 8; ++j) largest = simd::larger(largest, simd::load_as<Vec>(x + begin + j * kLanes));
      if (!(simd::max_lanes(largest) > values[count - 1])) continue;
    }
    for (int64_t i = begin; i < end; ++i) {
      if (found < count ? !(x[i] != x[i]) : x[i] > values[count - 1]) insert(i);
    }
  }
}

float sum_exp(const float* x, int64_t n, float max) {
  const Vec shift = simd::splat(max), log2e = simd::splat(1.44269504088896340736f);
  return sum_row(n, [&](int64_t i, int64_t end) {
    const Vec e = simd::exp2_nonpositive<true>((load_some(x + i, end - i) - shift) * log2e);
    return end - i >= kLanes ? e : simd::load_first<Vec>(reinterpret_cast<const float*>(&e), static_cast<int>(end - i));
  });
}

RowKernels make_row_kernels() {
  return {rms_norm,      layer_norm, rotate, rotate_interleaved, scale, add, softcap, to_bfloat16,
          from_bfloat16, top,        sum_exp};
}

}  // namespace
}  // namespace llmopt::decoder
