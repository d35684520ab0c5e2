#include "core/linear/kernels_table.h"

namespace llmopt::matmul {

const Kernels& avx512_bf16_kernels() {
  static const Kernels kernels = make_kernels<BFloat16PairOp>();
  return kernels;
}

}  // namespace llmopt::matmul
