#include "core/linear/kernels_table.h"
#include "core/linear/tile_formats.h"
#include "core/tiles.h"

namespace llmopt::matmul {

const Kernels& amx_kernels() {
  static const Kernels kernels = [] {
    Kernels made = make_kernels<BFloat16PairOp>();
    made.bfloat16_tiles = multiply_tiles<BFloat16Tiles>;
    made.int8_tiles = multiply_tiles<Int8Tiles>;
    made.enter_tiles = enter_tiles;
    made.leave_tiles = leave_tiles;
    return made;
  }();
  return kernels;
}

}  // namespace llmopt::matmul
