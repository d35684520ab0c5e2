#include "core/attention/kernels_table.h"

namespace llmopt::attention {

const Kernels& portable_kernels() {
  static const Kernels kernels = make_kernels<FloatDot<BFloat16>, FloatCompute<BFloat16>>();
  return kernels;
}

}  // namespace llmopt::attention
