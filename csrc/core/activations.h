// Activation functions on vectors. Only for the kernel sources, like simd.h.
#pragma once

#include "core/simd.h"

namespace llmopt::simd {
namespace {

LLMOPT_INLINE Vec reciprocal(Vec x) {
#if defined(__AVX512F__)
  const Vec guess = _mm512_rcp14_ps(x);
  return guess * (splat(2.0f) - x * guess);  // one Newton step: all but the last bit
#else
  return splat(1.0f) / x;
#endif
}

// 1 / (1 + exp(-x)), through exp(-|x|), which cannot overflow.
LLMOPT_INLINE Vec sigmoid(Vec x) {
  const IntVec negative = x < splat(0.0f);
  const Vec e = exp2_nonpositive<true>(select(negative, x, -x) * splat(1.44269504088896340736f));
  const Vec inverse = reciprocal(splat(1.0f) + e);
  return select(negative, e * inverse, inverse);
}

// x * (1 + erf(x / sqrt(2))) / 2. The tail Q(|x|) = erfc(|x| / sqrt(2)) / 2 is a polynomial in 1 / (1 + p |x| /
// sqrt(2)) times exp(-x^2 / 2) (Abramowitz and Stegun 7.1.26, absolute error 1.5e-7).
LLMOPT_INLINE Vec gelu(Vec x) {
  const IntVec negative = x < splat(0.0f);
  const Vec magnitude = select(negative, -x, x);
  const Vec t = splat(1.0f) / (splat(1.0f) + splat(0.3275911f * 0.70710678118654752440f) * magnitude);
  Vec p = splat(0.5f * 1.061405429f);
  p = p * t + splat(0.5f * -1.453152027f);
  p = p * t + splat(0.5f * 1.421413741f);
  p = p * t + splat(0.5f * -0.284496736f);
  p = p * t + splat(0.5f * 0.254829592f);
  const Vec tail = p * t * exp2_nonpositive<true>(x * x * splat(-0.72134752044448170368f));
  return x * select(negative, tail, splat(1.0f) - tail);
}

// The approximation of gelu by tanh: (1 + tanh(u)) / 2 = sigmoid(2 u).
LLMOPT_INLINE Vec gelu_tanh(Vec x) {
  return x * sigmoid(x * (splat(1.59576912160573071176f) + splat(0.07135481627159865742f) * x * x));
}

}  // namespace
}  // namespace llmopt::simd
