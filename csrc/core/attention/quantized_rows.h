// Rows of the quantized cache: n int8 values and their scale, a bfloat16, behind them. See llmopt/layer_cache.h.
#pragma once

#include <type_traits>

#include "core/attention/kernels.h"
#include "core/attention/simd.h"
#include "core/attention/storage.h"

namespace llmopt::attention {
namespace {

typedef int8_t ByteVec __attribute__((vector_size(kLanes)));

LLMOPT_INLINE Vec from_int8(const int8_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return __builtin_convertvector(__builtin_convertvector(load_as<ByteVec>(from), IntVec), Vec);
#endif
}

LLMOPT_INLINE void store_int8(int8_t* to, IntVec v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(v)));
#else
  store(to, __builtin_convertvector(v, ByteVec));
#endif
}

LLMOPT_INLINE Vec scale_behind(const int8_t* values) {
  uint16_t bits;
  std::memcpy(&bits, values, sizeof(bits));
  return splat(BFloat16::to_float(bits));
}

#if defined(__AVX512BF16__)
// 32 values as bfloat16.
LLMOPT_INLINE __m512i dequantize_32(const int8_t* from, Vec scale) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(from_int8(from + kLanes) * scale, from_int8(from) * scale));
}
#endif

template <class Storage>
LLMOPT_INLINE void dequantize_row(const int8_t* row, int n, typename Storage::Element* to) {
  const Vec scale = scale_behind(row + n);
  int i = 0;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Storage, BFloat16>) {
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) store(to + i, dequantize_32(row + i, scale));
  }
#endif
  for (; i + kLanes <= n; i += kLanes) Storage::store(to + i, from_int8(row + i) * scale);
  if (i == n) return;
  int8_t rest[kLanes] = {};
  typename Storage::Element wide[kLanes];
  std::memcpy(rest, row + i, n - i);
  Storage::store(wide, from_int8(rest) * scale);
  std::memcpy(to + i, wide, (n - i) * sizeof(wide[0]));
}

// The scale is the largest magnitude / 127, rounded up so that no value needs a clamp. Magnitudes below 1e-34 count as
// zero. A row with an infinity or a NaN becomes NaN.
template <class Storage>
void quantize_row(const void* from, int n, int8_t* to) {
  const auto* x = static_cast<const typename Storage::Element*>(from);
  const auto at = [&](int i) { return n - i >= kLanes ? Storage::load(x + i) : Storage::load_first(x + i, n - i); };
  IntVec largest{};  // as bits: those of magnitudes are in their order, infinity and NaN last
  for (int i = 0; i < n; i += kLanes) {
    const IntVec magnitude = reinterpret_cast<IntVec>(words(at(i)) & 0x7fffffff);
    const IntVec more = magnitude > largest;
    largest = (magnitude & more) | (largest & ~more);
  }
  int32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits = max(bits, largest[i]);
  float inverse = 0;
  uint16_t scale_bits = 0;
  if (bits >= 0x7f800000) {
    scale_bits = 0x7fc0;
  } else {
    float scale;
    std::memcpy(&scale, &bits, 4);
    scale /= 127;
    uint32_t up;
    std::memcpy(&up, &scale, 4);
    scale_bits = static_cast<uint16_t>((up + 0xffff) >> 16);
    scale = BFloat16::to_float(scale_bits);
    if (scale > 1e-36f) {
      inverse = 1 / scale;
    } else {
      scale_bits = 0;
    }
  }
  for (int i = 0; i < n; i += kLanes) {
    IntVec rounded{};
    if (inverse > 0) {  // adding 1.5 * 2^23 rounds to an integer in the low bits, ties to even
      rounded = reinterpret_cast<IntVec>(at(i) * splat(inverse) + splat(12582912.0f)) - 0x4b400000;
    }
    if (n - i >= kLanes) {
      store_int8(to + i, rounded);
    } else {
      int8_t rest[kLanes];
      store_int8(rest, rounded);
      std::memcpy(to + i, rest, n - i);
    }
  }
  std::memcpy(to + n, &scale_bits, sizeof(scale_bits));
}

template <class Element>
using StorageOf = std::conditional_t<std::is_same_v<Element, float>, Float32, BFloat16>;

// Rows of int8 behind the pointers become rows of elements in the scratch memory of the task, to which the pointers
// then point. Without quantization nothing happens.
template <class Element>
void unpack_rows(const Task& task, int num_keys, const Element** keys, const Element** values) {
  if (!task.is_quantized) return;
  auto* key = static_cast<Element*>(task.unpacked);
  Element* value = key + static_cast<int64_t>(num_keys) * task.head_dim;
  for (int j = 0; j < num_keys; ++j, key += task.head_dim, value += task.head_dim_v) {
    dequantize_row<StorageOf<Element>>(reinterpret_cast<const int8_t*>(keys[j]), task.head_dim, key);
    dequantize_row<StorageOf<Element>>(reinterpret_cast<const int8_t*>(values[j]), task.head_dim_v, value);
    keys[j] = key;
    values[j] = value;
  }
}

}  // namespace
}  // namespace llmopt::attention
