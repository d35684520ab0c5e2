// The rotation of keys and queries where the cache is quantized: see llmopt/layer_cache.h.
#pragma once

#include "core/attention/simd.h"
#include "core/attention/storage.h"

namespace llmopt::attention {
namespace {

// Sums and differences of lanes that lie kStride apart.
template <int kStride, int... kLane>
LLMOPT_INLINE Vec butterfly_of(Vec v, std::integer_sequence<int, kLane...>) {
  const Vec sign = {((kLane & kStride) != 0 ? -1.0f : 1.0f)...};
  return v * sign + __builtin_shufflevector(v, v, (kLane ^ kStride)...);
}
template <int kStride>
LLMOPT_INLINE Vec butterfly(Vec v) {
  if constexpr (kStride < kLanes) {
    return butterfly_of<kStride>(v, std::make_integer_sequence<int, kLanes>{});
  }
  return v;
}

// Fast Walsh-Hadamard transform: each stage adds and subtracts what lies a stride apart, strides from 1 on. In place
// where elements are floats.
template <class Storage>
void rotate_row(const void* from, int n, float* to) {
  const auto* x = static_cast<const typename Storage::Element*>(from);
  const int size = n & -n;
  const Vec factor = splat(static_cast<float>(1 / __builtin_sqrt(static_cast<double>(size))));
  for (int i = 0; i < n; i += kLanes) {
    const bool is_whole = n - i >= kLanes;
    Vec v = is_whole ? Storage::load(x + i) : Storage::load_first(x + i, n - i);
    if (size > 1) v = butterfly<1>(v);
    if (size > 2) v = butterfly<2>(v);
    if (size > 4) v = butterfly<4>(v);
    if (size > 8) v = butterfly<8>(v);
    if (size <= kLanes) v *= factor;
    std::memcpy(to + i, &v, is_whole ? sizeof(v) : (n - i) * sizeof(float));
  }
  for (int stride = kLanes; stride < size; stride *= 2) {  // n is a multiple of kLanes
    const Vec scale = 2 * stride == size ? factor : splat(1.0f);
    for (int begin = 0; begin < n; begin += 2 * stride) {
      for (int i = begin; i < begin + stride; i += kLanes) {
        const Vec a = load_as<Vec>(to + i), b = load_as<Vec>(to + i + stride);
        store(to + i, (a + b) * scale);
        store(to + i + stride, (a - b) * scale);
      }
    }
  }
}

}  // namespace
}  // namespace llmopt::attention
