// The kernels of one instruction set. Included by sources that differ only in their compiler flags.
#pragma once

#include "core/linear/dense.h"
#include "core/linear/int_formats.h"
#include "core/linear/kernels.h"

namespace llmopt::matmul {
namespace {

void fill_bfloat16(const float* values, int64_t n, int64_t padded, uint16_t* row) {
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) store(row + k, to_bfloat16(load_as<Vec>(values + k)));
  if (k < n) {
    store(row + k, to_bfloat16(load_first<Vec>(values + k, static_cast<int>(n - k))));
    k += kLanes;
  }
  for (; k < padded; k += kLanes) store(row + k, HalfVec{});
}

template <class BFloat16Op>
Kernels make_kernels() {
  Kernels kernels;
  kernels.bf16_form = BFloat16Op::kForm;
  kernels.float32 = multiply_dense<Float32Op>;
  kernels.bfloat16 = multiply_dense<BFloat16Op>;
  kernels.fill_bfloat16 = fill_bfloat16;
  add_int_kernels(kernels);
  return kernels;
}

}  // namespace
}  // namespace llmopt::matmul
