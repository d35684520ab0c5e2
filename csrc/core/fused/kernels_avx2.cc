#include "core/fused/kernels_table.h"

namespace llmopt::fused {

const Kernels& avx2_kernels() {
  static const Kernels kernels = make_kernels();
  return kernels;
}

}  // namespace llmopt::fused
