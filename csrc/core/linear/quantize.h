// Input rows to integers: round(x / scale) with scale = max |x| / limit, so -limit..limit. Only for kernel sources.
#pragma once

#include "core/linear/int_layout.h"
#include "core/simd.h"

namespace llmopt::matmul {
namespace {

using namespace simd;

typedef int8_t ByteVec __attribute__((vector_size(kLanes)));

struct Magnitude {
  Vec max{};
  IntVec nan{};

  LLMOPT_INLINE void take(Vec v) {
    max = larger(floats(words(v) & 0x7fffffff), max);
    nan |= v != v;
  }
  // NaN when there was one: then every product with the row is NaN, and nobody mistakes it for a result.
  LLMOPT_INLINE float value() const { return max_lanes(max) + sum_lanes(floats(reinterpret_cast<WordVec>(nan))); }
};

constexpr float kGroupLimit = 127.0f;
constexpr float kTokenLimit = 127 * 128 + 63;  // 128 * high + low

LLMOPT_INLINE float inverse_step(float magnitude, float limit) { return magnitude > 1e-30f ? limit / magnitude : 0.0f; }

// Zeros where v is not finite: sums of what lies in their bits could overflow. The scale says that there was one.
LLMOPT_INLINE IntVec integers(Vec v, float inverse) {
  const Vec scaled = v * splat(inverse);
  const Vec shifted = scaled + splat(12582912.0f);  // 1.5 * 2^23: the integer lands in the low bits
  return reinterpret_cast<IntVec>(words(shifted) - 0x4b400000u) & (scaled == scaled);
}

LLMOPT_INLINE void store_bytes(IntVec q, int8_t* to) {
#if defined(__AVX512F__)  // GCC 12 narrows lane by lane otherwise
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(q)));
#else
  store(to, __builtin_convertvector(q, ByteVec));
#endif
}

LLMOPT_INLINE int32_t sum_lanes(IntVec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(v));
#else
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
#endif
}

// One scale for the row. negative_sums: of high, of low
void fill_int16_token(const float* values, int64_t n, int64_t padded, int8_t* high, int8_t* low, float* scale,
                      int32_t* negative_sums) {
  const int64_t whole = n / kLanes * kLanes;
  const int rest = static_cast<int>(n - whole);
  Magnitude magnitude;
  for (int64_t k = 0; k < whole; k += kLanes) magnitude.take(load_as<Vec>(values + k));
  if (rest > 0) magnitude.take(load_first<Vec>(values + whole, rest));
  const float max = magnitude.value(), inverse = inverse_step(max, kTokenLimit);
  IntVec high_total{}, low_total{};
  const auto put = [&](Vec v, int64_t k) __attribute__((always_inline)) {
    const IntVec q = integers(v, inverse), of_high = (q + 64) >> 7, of_low = q - of_high * 128;
    store_bytes(of_high, high + k);
    store_bytes(of_low, low + k);
    high_total += of_high;
    low_total += of_low;
  };
  int64_t k = 0;
  for (; k < whole; k += kLanes) put(load_as<Vec>(values + k), k);
  if (rest > 0) {
    put(load_first<Vec>(values + k, rest), k);
    k += kLanes;
  }
  std::memset(high + k, 0, padded - k);
  std::memset(low + k, 0, padded - k);
  *scale = max * (1.0f / kTokenLimit);
  negative_sums[0] = -sum_lanes(high_total);
  negative_sums[1] = -sum_lanes(low_total);
}

// One scale for each 32 values; sums: scale * sum of the group's int8 values.
void fill_int8_group(const float* values, int64_t n, int64_t padded, int8_t* row, float* scales, float* sums,
                     int32_t* negative_sums, int32_t* negative_half_sums) {
  constexpr int kVecs = integer::kInputGroup / kLanes;
  for (int64_t begin = 0, g = 0; begin < padded; begin += integer::kInputGroup, ++g) {
    Vec v[kVecs];
    Magnitude magnitude;
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) {
      const int64_t k = begin + i * kLanes, left = n - k;
      v[i] = left >= kLanes ? load_as<Vec>(values + k)
             : left > 0     ? load_first<Vec>(values + k, static_cast<int>(left))
                            : Vec{};
      magnitude.take(v[i]);
    }
    const float max = magnitude.value(), inverse = inverse_step(max, kGroupLimit), scale = max * (1.0f / kGroupLimit);
    IntVec half[2] = {};
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) {
      const IntVec q = integers(v[i], inverse);
      store_bytes(q, row + begin + i * kLanes);
      half[i * 2 / kVecs] += q;
    }
    const int32_t first = sum_lanes(half[0]), second = sum_lanes(half[1]);
    scales[g] = scale;
    sums[g] = scale * static_cast<float>(first + second);
    negative_sums[g] = -(first + second);
    negative_half_sums[2 * g] = -first;
    negative_half_sums[2 * g + 1] = -second;
  }
}

}  // namespace
}  // namespace llmopt::matmul
