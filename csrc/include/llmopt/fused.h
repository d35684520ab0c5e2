// The small operations of a decoder layer, each in one pass over its input, for models that run operation by operation.
// They round to bfloat16 where the operations they stand for would. Large inputs are shared by a team of threads.
#pragma once

#include <cstdint>

#include "llmopt/dtype.h"

namespace llmopt {

// y = x / sqrt(mean(x^2) + eps) * weight, over rows of `size` values.
struct RmsNormArgs {
  DType dtype;         // of x, weight and out
  const void* x;       // [num_rows, size], rows contiguous
  int64_t row_stride;  // elements between rows of x
  const void* weight;  // [size], or null
  void* out;           // [num_rows, size], contiguous
  int64_t num_rows, size;
  float eps;
  bool adds_one;      // the factor is 1 + weight
  bool rounds_first;  // x / sqrt(...) is rounded to dtype before it meets the weight
};
void rms_norm(const RmsNormArgs& args, int num_threads);

// out = act(gate) * up, with act(gate) rounded to dtype.
enum class GateActivation : uint8_t { kSilu, kGelu, kGeluTanh };
struct GatedArgs {
  DType dtype;
  GateActivation activation;
  const void* gate;  // [num_rows, size], rows contiguous
  int64_t gate_stride;
  const void* up;
  int64_t up_stride;
  void* out;  // [num_rows, size], contiguous
  int64_t num_rows, size;
};
void gated_activation(const GatedArgs& args, int num_threads);

// Rotary position embedding: out = x * cos + rotated(x) * sin on the first `rotary_dim` values of every head, the rest
// is copied. rotated pairs i with i + rotary_dim / 2, or with interleaving 2i with 2i + 1.
struct RotateArgs {
  DType dtype;
  const void* x;  // [num_batches, num_tokens, num_heads, head_dim] in any order of the strides below
  int64_t batch_stride, token_stride, head_stride;
  const void* cos;  // [num_batches, num_tokens, rotary_dim]
  const void* sin;  // likewise, same strides
  int64_t cos_batch_stride, cos_token_stride;
  void* out;  // [num_batches, num_tokens, num_heads, head_dim], contiguous
  int64_t num_batches, num_tokens, num_heads, head_dim, rotary_dim;
  bool interleaved;
  bool rounds_products;  // both products are rounded to dtype before they are added
};
void rotate(const RotateArgs& args, int num_threads);

// y = x W^T + bias for few rows of x, with the weights as they lie: what counts is that they are read once, and well.
struct FewRowsArgs {
  DType dtype;
  const void* x;  // [num_rows, num_inputs], rows contiguous
  int64_t x_stride;
  const void* weight;  // [num_outputs, num_inputs], rows contiguous
  int64_t weight_stride;
  const void* bias;  // [num_outputs], or null
  void* out;         // [num_rows, num_outputs], contiguous
  int64_t num_rows, num_inputs, num_outputs;
};
void few_rows_linear(const FewRowsArgs& args, int num_threads);

// Rough times on one thread, to decide whether a call is worth a team, or giving up the interpreter lock.
double estimate_ns(const RmsNormArgs& args);
double estimate_ns(const GatedArgs& args);
double estimate_ns(const RotateArgs& args);
double estimate_ns(const FewRowsArgs& args);

}  // namespace llmopt
