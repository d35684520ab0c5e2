// Dot products of bfloat16 and of bytes in one instruction each.
#pragma once

#include <immintrin.h>

#include "core/machine_probe/loops.h"

namespace llmopt::machine_probe {
namespace {

float dot_bf16(int64_t iterations) {
  __m512 accumulators[kNumAccumulators] = {};
  // 2^-126 per pair: sums stay small and are no subnormal numbers
  const auto pair = (__m512bh)_mm512_set1_epi16(0x2000);
  for (int64_t round = 0; round < iterations; ++round) {
#pragma GCC unroll 12
    for (__m512& accumulator : accumulators) accumulator = _mm512_dpbf16_ps(accumulator, pair, pair);
  }
  __m512 total{};
  for (__m512 accumulator : accumulators) total = _mm512_add_ps(total, accumulator);
  return total[0];
}

float dot_u8s8(int64_t iterations) {
  __m512i accumulators[kNumAccumulators] = {};
  const __m512i bytes = _mm512_set1_epi8(1);
  for (int64_t round = 0; round < iterations; ++round) {
#pragma GCC unroll 12
    for (__m512i& accumulator : accumulators) accumulator = _mm512_dpbusd_epi32(accumulator, bytes, bytes);
  }
  __m512i total{};
  for (__m512i accumulator : accumulators) total = _mm512_add_epi32(total, accumulator);
  return static_cast<float>(total[0]);
}

Kernels make_dot_kernels() {
  Kernels kernels = make_kernels();
  kernels.bfloat16_dot = {2.0 * kNumAccumulators * 32, dot_bf16};
  kernels.int8_dot = {2.0 * kNumAccumulators * 64, dot_u8s8};
  return kernels;
}

}  // namespace
}  // namespace llmopt::machine_probe
