#include "core/machine_probe/loops.h"

namespace llmopt::machine_probe {

const Kernels& portable_kernels() {
  static const Kernels kernels = make_kernels();
  return kernels;
}

}  // namespace llmopt::machine_probe
