#include "core/decoder/row_kernels.h"

namespace llmopt::decoder {

const RowKernels& row_kernels(Isa isa) {
  switch (isa) {
#if defined(LLMOPT_X86)
    case Isa::kAmx:  // tiles have nothing to add to rows
    case Isa::kAvx512Bf16:
      return avx512_bf16_row_kernels();
    case Isa::kAvx512:
      return avx512_row_kernels();
    case Isa::kAvx2:
      return avx2_row_kernels();
#endif
    default:
      return portable_row_kernels();
  }
}

}  // namespace llmopt::decoder
