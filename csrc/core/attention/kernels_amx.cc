#include "core/attention/column_tiles.h"
#include "core/attention/kernels_table.h"
#include "core/attention/row_tiles.h"
#include "core/tiles.h"

namespace llmopt::attention {

const Kernels& amx_kernels() {
  static const Kernels kernels = [] {
    Kernels made = make_kernels<PairDot, AmxCompute>();
    made.rows_limit_bf16 = 4;
    made.attend_row_tiles_bf16 = [](const Task& task) {
      (task.is_quantized ? attend_row_tiles<true> : attend_row_tiles<false>)(task);
    };
    made.row_tile_workspace_bytes = row_tile_workspace_bytes;
    made.attend_column_tiles_bf16 = attend_column_tiles;
    made.column_tile_workspace_bytes = column_tile_workspace_bytes;
    made.enter_tiles = enter_tiles;
    made.leave_tiles = leave_tiles;
    return made;
  }();
  return kernels;
}

}  // namespace llmopt::attention
