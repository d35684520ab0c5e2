// The kernels of one instruction set. Included by sources that differ only in their compiler flags.
#pragma once

#include "core/fused/few_rows.h"
#include "core/fused/kernels.h"
#include "core/fused/pointwise.h"

namespace llmopt::fused {
namespace {

template <template <class> class Kernel, class Args>
void run(const Args& args, int64_t begin, int64_t end) {
  if (args.dtype == DType::kBFloat16) {
    Kernel<uint16_t>::run(args, begin, end);
  } else {
    Kernel<float>::run(args, begin, end);
  }
}

inline Kernels make_kernels() {
  return {run<RmsNorm, RmsNormArgs>, run<Gated, GatedArgs>, run<Rotate, RotateArgs>, run<FewRows, FewRowsArgs>};
}

}  // namespace
}  // namespace llmopt::fused
