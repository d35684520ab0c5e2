// How cached elements are read, and where the keys and values of a task lie.
#pragma once

#include "core/attention/kernels.h"
#include "core/attention/simd.h"

namespace llmopt::attention {
namespace {

struct Float32 {
  using Element = float;
  static LLMOPT_INLINE Vec load(const float* from) { return load_as<Vec>(from); }
  static LLMOPT_INLINE Vec load_first(const float* from, int n) { return attention::load_first<Vec>(from, n); }
  static float to_float(float x) { return x; }
  static LLMOPT_INLINE void store(float* to, Vec v) { attention::store(to, v); }
};

struct BFloat16 {
  using Element = uint16_t;
  static LLMOPT_INLINE Vec load(const uint16_t* from) { return from_bfloat16(load_as<HalfVec>(from)); }
  static LLMOPT_INLINE Vec load_first(const uint16_t* from, int n) {
    return from_bfloat16(attention::load_first<HalfVec>(from, n));
  }
  static float to_float(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  static LLMOPT_INLINE void store(uint16_t* to, Vec v) { attention::store(to, to_bfloat16(v)); }
};

// Dot products in float32, whatever the storage.
template <class Storage>
struct FloatDot {
  using Element = typename Storage::Element;
  using Query = float;
  using Operand = Vec;
  static constexpr int kStep = kLanes;
  static Query to_query(Element x) { return Storage::to_float(x); }
  static LLMOPT_INLINE Vec load_query(const float* from) { return load_as<Vec>(from); }
  static LLMOPT_INLINE Vec load_key(const Element* from) { return Storage::load(from); }
  static LLMOPT_INLINE Vec load_key_first(const Element* from, int n) { return Storage::load_first(from, n); }
  static LLMOPT_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
};

#if defined(__AVX512BF16__)
// Products of pairs of bfloat16, added in float32.
struct PairDot {
  using Element = uint16_t;
  using Query = uint16_t;
  using Operand = __m512bh;
  static constexpr int kStep = 2 * kLanes;
  static Query to_query(uint16_t x) { return x; }
  static LLMOPT_INLINE __m512bh load_query(const uint16_t* from) { return load_as<__m512bh>(from); }
  static LLMOPT_INLINE __m512bh load_key(const uint16_t* from) { return load_as<__m512bh>(from); }
  static LLMOPT_INLINE __m512bh load_key_first(const uint16_t* from, int n) {
    return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16((1u << n) - 1, from));
  }
  static LLMOPT_INLINE Vec multiply_add(__m512bh a, __m512bh b, Vec c) { return _mm512_dpbf16_ps(c, a, b); }
};
#endif

// Addresses of the rows of `num_keys` keys and values from key `begin` on. Where the cache is quantized, rows hold
// int8, whatever the type says.
template <class Element>
void locate(const Task& task, int begin, int num_keys, const Element** keys, const Element** values) {
  int block = begin / task.block_size, offset = begin % task.block_size;
  for (int j = 0; j < num_keys; ++block, offset = 0) {
    const int64_t id = task.block_table[block];
    const std::byte* k = task.key + id * task.key_block_bytes + offset * static_cast<int64_t>(task.key_row_bytes);
    const std::byte* v = task.value + id * task.value_block_bytes + offset * static_cast<int64_t>(task.value_row_bytes);
    for (; offset < task.block_size && j < num_keys; ++offset, ++j) {
      keys[j] = reinterpret_cast<const Element*>(k);
      values[j] = reinterpret_cast<const Element*>(v);
      k += task.key_row_bytes;
      v += task.value_row_bytes;
    }
  }
}

}  // namespace
}  // namespace llmopt::attention
