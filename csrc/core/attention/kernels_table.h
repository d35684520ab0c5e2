// The kernels of one instruction set. Included by sources that differ only in their compiler flags.
#pragma once

#include "core/attention/compute.h"
#include "core/attention/quantized_rows.h"
#include "core/attention/rotation.h"
#include "core/attention/rows.h"
#include "core/attention/tile.h"

namespace llmopt::attention {
namespace {

template <class Storage>
void write_row(const float* row, int n, float factor, void* out) {
  auto* to = static_cast<typename Storage::Element*>(out);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) Storage::store(to + i, load_as<Vec>(row + i) * factor);
  if (i == n) return;
  typename Storage::Element rest[kLanes];
  Storage::store(rest, load_as<Vec>(row + i) * factor);  // rows are padded
  std::memcpy(to + i, rest, (n - i) * sizeof(rest[0]));
}

template <class Dot, class TileCompute>
Kernels make_kernels() {
  Kernels kernels{};
  kernels.attend_rows_f32 = attend_rows<FloatDot<Float32>, Float32>;
  kernels.attend_rows_bf16 = attend_rows<Dot, BFloat16>;
  kernels.attend_tile_f32 = attend_tile<FloatCompute<Float32>>;
  kernels.attend_tile_bf16 = attend_tile<TileCompute>;
  kernels.write_row_f32 = write_row<Float32>;
  kernels.write_row_bf16 = write_row<BFloat16>;
  kernels.rotate_row_f32 = rotate_row<Float32>;
  kernels.rotate_row_bf16 = rotate_row<BFloat16>;
  kernels.quantize_row_f32 = quantize_row<Float32>;
  kernels.quantize_row_bf16 = quantize_row<BFloat16>;
  kernels.workspace_bytes = [](int rows, int head_dim, int head_dim_v) {
    const size_t few = rows_workspace_bytes(head_dim);
    const size_t f32 = tile_workspace_bytes<FloatCompute<Float32>>(rows, head_dim, head_dim_v);
    const size_t bf16 = tile_workspace_bytes<TileCompute>(rows, head_dim, head_dim_v);
    const size_t tile = f32 > bf16 ? f32 : bf16;
    return few > tile ? few : tile;
  };
  return kernels;
}

}  // namespace
}  // namespace llmopt::attention
