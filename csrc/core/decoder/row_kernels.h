// What happens to one row of float32 between two matrices, compiled once per instruction set.
#pragma once

#include <cstdint>

#include "llmopt/isa.h"

namespace llmopt::decoder {

// n counts values; rows need no alignment and no padding.
struct RowKernels {
  // out = x / sqrt(mean(x^2) + epsilon) * weight; weight may be null: ones. out may be x.
  void (*rms_norm)(const float* x, int64_t n, const float* weight, float epsilon, float* out);
  // out = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias; both may be null. out may be x.
  void (*layer_norm)(const float* x, int64_t n, const float* weight, const float* bias, float epsilon, float* out);
  // Rotate pairs (i, i + half) of x by the angle whose cosine and sine are given.
  void (*rotate)(float* x, int64_t half, const float* cos, const float* sin);
  // The same for pairs (2i, 2i + 1).
  void (*rotate_interleaved)(float* x, int64_t half, const float* cos, const float* sin);
  void (*scale)(float* x, int64_t n, float factor);                // x *= factor
  void (*add)(float* x, int64_t n, const float* y, float factor);  // x += y * factor
  void (*softcap)(float* x, int64_t n, float cap);                 // x = tanh(x / cap) * cap
  void (*to_bfloat16)(const float* x, int64_t n, uint16_t* out);   // round to nearest, ties to even
  void (*from_bfloat16)(const uint16_t* x, int64_t n, float* out);
  // Places and values of the `count` largest, the largest first, of equal ones the first; 1 <= count <= n. NaN counts
  // as -inf.
  void (*top)(const float* x, int64_t n, int count, int32_t* places, float* values);
  float (*sum_exp)(const float* x, int64_t n, float max);  // sum of exp(x - max), for no x above max
};

const RowKernels& portable_row_kernels();
#if defined(LLMOPT_X86)
const RowKernels& avx2_row_kernels();
const RowKernels& avx512_row_kernels();
const RowKernels& avx512_bf16_row_kernels();
#endif

const RowKernels& row_kernels(Isa isa);

}  // namespace llmopt::decoder
