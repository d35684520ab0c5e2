#include "core/attention/kernels_table.h"

namespace llmopt::attention {

const Kernels& avx512_bf16_kernels() {
  static const Kernels kernels = make_kernels<PairDot, PairCompute>();
  return kernels;
}

}  // namespace llmopt::attention
