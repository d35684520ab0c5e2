// Vectors of the instruction set this file is compiled for. Only for the kernel sources, each of which is compiled with
// its own flags: everything here has internal linkage, so no code of a wide set can replace that of a narrow one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace llmopt::simd {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t WordVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));

#define LLMOPT_INLINE inline __attribute__((always_inline))

constexpr int min(int a, int b) { return a < b ? a : b; }
constexpr int max(int a, int b) { return a > b ? a : b; }
constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <class V, class T>
LLMOPT_INLINE V load_as(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}
// The first n elements, zeros behind them; reads nothing else.
template <class V, class T>
LLMOPT_INLINE V load_first(const T* from, int n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64 && sizeof(T) == 4) {
    return reinterpret_cast<V>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << n) - 1), from));
  } else if constexpr (sizeof(V) == 64) {
    return reinterpret_cast<V>(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << n) - 1), from));
  } else {
    return reinterpret_cast<V>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), from));
  }
#endif
  V v{};
  std::memcpy(&v, from, static_cast<size_t>(n) * sizeof(T));
  return v;
}
template <class V, class T>
LLMOPT_INLINE void store(T* to, V v) {
  std::memcpy(to, &v, sizeof(V));
}

template <int... kLane>
LLMOPT_INLINE Vec splat_of(float x, std::integer_sequence<int, kLane...>) {
  return Vec{(static_cast<void>(kLane), x)...};
}
LLMOPT_INLINE Vec splat(float x) { return splat_of(x, std::make_integer_sequence<int, kLanes>{}); }
LLMOPT_INLINE WordVec words(Vec v) { return reinterpret_cast<WordVec>(v); }
LLMOPT_INLINE Vec floats(WordVec v) { return reinterpret_cast<Vec>(v); }

LLMOPT_INLINE Vec select(IntVec mask, Vec yes, Vec no) {
  return floats((words(yes) & reinterpret_cast<WordVec>(mask)) | (words(no) & ~reinterpret_cast<WordVec>(mask)));
}

// The larger of each lane; b when one of them is NaN.
LLMOPT_INLINE Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return select(a > b, a, b);
#endif
}

template <int... kLane>
LLMOPT_INLINE IntVec iota_of(std::integer_sequence<int, kLane...>) {
  return IntVec{kLane...};
}
LLMOPT_INLINE IntVec iota() { return iota_of(std::make_integer_sequence<int, kLanes>{}); }

// a0 b0 a1 b1 ... of the lower halves, and of the upper halves.
template <class V, int... kLane>
LLMOPT_INLINE V interleave_low_of(V a, V b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, (kLane / 2 + (kLane % 2) * kLanes)...);
}
template <class V>
LLMOPT_INLINE V interleave_low(V a, V b) {
  return interleave_low_of(a, b, std::make_integer_sequence<int, kLanes>{});
}
template <class V, int... kLane>
LLMOPT_INLINE V interleave_high_of(V a, V b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, (kLane / 2 + kLanes / 2 + (kLane % 2) * kLanes)...);
}
template <class V>
LLMOPT_INLINE V interleave_high(V a, V b) {
  return interleave_high_of(a, b, std::make_integer_sequence<int, kLanes>{});
}

// Lane i of the result is the sum of the lanes of v[i]. Each round halves the number of vectors and doubles the
// number of sums that share one.
LLMOPT_INLINE Vec sum_each(Vec (&v)[kLanes]) {
#pragma GCC unroll 16
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < half; ++i) v[i] = interleave_low(v[i], v[i + half]) + interleave_high(v[i], v[i + half]);
  }
  return v[0];
}

// Transpose a square of kLanes x kLanes words: log2(kLanes) perfect shuffles of the rows.
LLMOPT_INLINE void transpose(WordVec (&v)[kLanes]) {
#pragma GCC unroll 4
  for (int round = kLanes; round > 1; round /= 2) {
    WordVec next[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleave_low(v[i], v[i + kLanes / 2]);
      next[2 * i + 1] = interleave_high(v[i], v[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) v[i] = next[i];
  }
}

LLMOPT_INLINE float sum_lanes(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
#endif
}
LLMOPT_INLINE float max_lanes(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float lanes[kLanes];
  store(lanes, v);
  float best = lanes[0];
  for (int i = 1; i < kLanes; ++i) best = best > lanes[i] ? best : lanes[i];
  return best;
#endif
}

// bfloat16 is the upper half of float32.
LLMOPT_INLINE WordVec widen(HalfVec v) {
#if defined(__AVX512F__)  // the builtin takes two halves and joins them
  return reinterpret_cast<WordVec>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<WordVec>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(v)));
#else
  return __builtin_convertvector(v, WordVec);
#endif
}
LLMOPT_INLINE Vec from_bfloat16(HalfVec v) { return floats(widen(v) << 16); }
LLMOPT_INLINE HalfVec to_bfloat16(Vec v) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<HalfVec>(_mm512_cvtneps_pbh(v));
#else
  // Round to nearest, ties to even; NaN keeps its upper half and stays quiet.
  const WordVec bits = words(v);
  const WordVec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const WordVec nan = reinterpret_cast<WordVec>(v != v);
  return __builtin_convertvector((rounded & ~nan) | (((bits >> 16) | 0x40) & nan), HalfVec);
#endif
}

// 2^x for x <= 0; anything below -126 gives 2^-126. The argument is split into an integer, which moves the exponent,
// and a fraction in [-0.5, 0.5] for a polynomial (least maximal relative error, fitted for this use).
// Relative error: 2e-7 with kExact, else 8e-5, far below the step of bfloat16.
template <bool kExact>
LLMOPT_INLINE Vec exp2_nonpositive(Vec x) {
  x = larger(splat(-126.0f), x);               // NaN stays
  const Vec shifted = x + splat(12582912.0f);  // 1.5 * 2^23: the integer lands in the low bits
  const Vec fraction = x - (shifted - splat(12582912.0f));
  Vec p;
  if constexpr (kExact) {
    p = splat(0.0013276474783f);
    p = p * fraction + splat(0.0096755409614f);
    p = p * fraction + splat(0.0555071309209f);
    p = p * fraction + splat(0.2402212023735f);
    p = p * fraction + splat(0.6931469440461f);
    p = p * fraction + splat(1.0f);
  } else {
    p = splat(0.0551716871560f);
    p = p * fraction + splat(0.2426111251116f);
    p = p * fraction + splat(0.6932609677315f);
    p = p * fraction + splat(0.9999280571938f);
  }
  return floats(words(p) + (words(shifted) << 23));
}

// tanh: a polynomial in x^2 near zero, where the other form cancels; 1 - 2 / (exp(2x) + 1) elsewhere.
LLMOPT_INLINE Vec tanh(Vec x) {
  const Vec square = x * x;
  Vec p = splat(-0.0056599890813f);
  p = p * square + splat(0.0205909889191f);
  p = p * square + splat(-0.0537210665643f);
  p = p * square + splat(0.1333112716675f);
  p = p * square + splat(-0.3333325982094f);
  p = p * square + splat(1.0f);
  const IntVec negative = x < splat(0.0f);
  const Vec magnitude = select(negative, -x, x);
  const Vec e = exp2_nonpositive<true>(magnitude * splat(-2.88539008177792681472f));  // exp(-2|x|)
  const Vec far = (splat(1.0f) - e) / (splat(1.0f) + e);
  return select(magnitude < splat(0.625f), p * x, select(negative, -far, far));
}

}  // namespace
}  // namespace llmopt::simd
