#include "core/machine_probe/dots_avx512_bf16.h"

namespace llmopt::machine_probe {

const Kernels& avx512_bf16_kernels() {
  static const Kernels kernels = make_dot_kernels();
  return kernels;
}

}  // namespace llmopt::machine_probe
