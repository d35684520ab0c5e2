#include "core/decoder/row_kernels_table.h"

namespace llmopt::decoder {

const RowKernels& avx2_row_kernels() {
  static const RowKernels kernels = make_row_kernels();
  return kernels;
}

}  // namespace llmopt::decoder
