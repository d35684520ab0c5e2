// The kernels of one instruction set: rows [begin, end) of each operation, on one thread.
#pragma once

#include "llmopt/fused.h"
#include "llmopt/isa.h"

namespace llmopt::fused {

struct Kernels {
  void (*rms_norm)(const RmsNormArgs& args, int64_t row_begin, int64_t row_end);
  void (*gated_activation)(const GatedArgs& args, int64_t row_begin, int64_t row_end);
  // A row is one token of one batch, all heads of it.
  void (*rotate)(const RotateArgs& args, int64_t row_begin, int64_t row_end);
  // A row is one output.
  void (*few_rows_linear)(const FewRowsArgs& args, int64_t output_begin, int64_t output_end);
};

const Kernels& portable_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();

// Nothing here uses tiles: with AMX the kernels of AVX512-BF16 run.
const Kernels& kernels(Isa isa);

}  // namespace llmopt::fused
