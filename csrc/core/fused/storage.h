// float32 and bfloat16 rows as vectors of float32.
#pragma once

#include "core/simd.h"

namespace llmopt::fused {
namespace {

using namespace simd;  // NOLINT: internal linkage, kernel sources only

LLMOPT_INLINE Vec load_vec(const float* from) { return load_as<Vec>(from); }
LLMOPT_INLINE Vec load_vec(const uint16_t* from) { return from_bfloat16(load_as<HalfVec>(from)); }
LLMOPT_INLINE Vec load_vec(const float* from, int n) { return load_first<Vec>(from, n); }
LLMOPT_INLINE Vec load_vec(const uint16_t* from, int n) { return from_bfloat16(load_first<HalfVec>(from, n)); }

LLMOPT_INLINE void store_vec(float* to, Vec v) { store(to, v); }
LLMOPT_INLINE void store_vec(uint16_t* to, Vec v) { store(to, to_bfloat16(v)); }
LLMOPT_INLINE void store_vec(float* to, Vec v, int n) { std::memcpy(to, &v, n * sizeof(float)); }
LLMOPT_INLINE void store_vec(uint16_t* to, Vec v, int n) {
  const HalfVec half = to_bfloat16(v);
  std::memcpy(to, &half, n * sizeof(uint16_t));
}

// What is left of a value that was stored.
template <class Element>
LLMOPT_INLINE Vec rounded(Vec v) {
  if constexpr (sizeof(Element) == 2) return from_bfloat16(to_bfloat16(v));
  return v;
}

// body(first, num) for whole vectors, then once for what is left; num is a constant for whole ones.
template <class Body>
LLMOPT_INLINE void for_each_vec(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, std::integral_constant<int, kLanes>{});
  if (i < size) body(i, static_cast<int>(size - i));
}

template <class Element, int kNum>
LLMOPT_INLINE Vec load_at(const Element* from, std::integral_constant<int, kNum>) {
  return load_vec(from);
}
template <class Element>
LLMOPT_INLINE Vec load_at(const Element* from, int num) {
  return load_vec(from, num);
}
template <class Element, int kNum>
LLMOPT_INLINE void store_at(Element* to, Vec v, std::integral_constant<int, kNum>) {
  store_vec(to, v);
}
template <class Element>
LLMOPT_INLINE void store_at(Element* to, Vec v, int num) {
  store_vec(to, v, num);
}

}  // namespace
}  // namespace llmopt::fused
