#include "core/linear/kernels_table.h"

namespace llmopt::matmul {

const Kernels& avx512_kernels() {
  static const Kernels kernels = make_kernels<WidenedBFloat16Op>();
  return kernels;
}

}  // namespace llmopt::matmul
