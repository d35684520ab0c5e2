// kInt8: one scale per column, one per row of the input. The dot products are exact integers. Only for kernel sources.
#pragma once

#include "core/linear/int_rows.h"

namespace llmopt::matmul {
namespace {

struct Int8Columns {
  template <int kRows>
  static void multiply(const Task& task, const std::byte* panel, int64_t row, int64_t ahead, float* out,
                       int64_t stride) {
    // Independent sums for the latency of a dot product, which is several times the time between two.
    constexpr int kSplit = kRows == 1 ? 4 : kRows == 2 ? 2 : 1;
    const int64_t depth = task.depth, row_bytes = task.input.row_bytes;
    const int8_t* x = int8_row(task, row);
    const std::byte* values = panel;
    Sums sums[kSplit][kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int s = 0; s < kSplit; ++s) sums[s][r] = zero_sums();
    }
    for (int64_t k = 0; k < depth; k += 16, x += 16, values += 256) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        __builtin_prefetch(values + ahead + i * 64, 0, 3);
        const Bytes q = load_row(values + i * 64);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sums[i % kSplit][r] = dot_bytes(sums[i % kSplit][r], q, x + r * row_bytes + 4 * i);
        }
      }
    }
    const Floats scales = load_floats(values);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Sums sum = sums[0][r];
#pragma GCC unroll 4
      for (int s = 1; s < kSplit; ++s) sum = add(sum, sums[s][r]);
      sum = add(sum, first_sums<kByteZero>(task.input.negative_sums + row + r));
      const Floats scale = product(scales, floats_of(task.input.scales[row + r]));
      store_floats(out + r * stride, product(to_floats(sum), scale));
    }
  }
};

#if defined(__AMX_INT8__)

// dots[32 or 16][32] = x (signed) times two panels (unsigned), exact. `ahead`: how far behind these the next panels
// lie, which are fetched meanwhile; 0: not needed.
inline void multiply_tiles(const std::byte* x, int64_t row_bytes, const std::byte* left, const std::byte* right,
                           int64_t depth, bool both_halves, int64_t ahead, int32_t* dots) {
  constexpr int64_t kTile = 16 * 64, kStride = 2 * kPanelWidth * 4;
  const std::byte* x2 = x + 16 * row_bytes;
  // The tile intrinsics do not tell the compiler which memory they touch.
  asm volatile("" : : : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < depth; k += 64, left += kTile, right += kTile) {
    _tile_loadd(4, x + k, row_bytes);
    _tile_loadd(6, left, 64);
    _tile_loadd(7, right, 64);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    if (both_halves) {
      _tile_loadd(5, x2 + k, row_bytes);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
    if (ahead > 0) {
#pragma GCC unroll 16
      for (int i = 0; i < kTile; i += 64) {
        __builtin_prefetch(left + ahead + i, 0, 2);
        __builtin_prefetch(right + ahead + i, 0, 2);
      }
    }
  }
  _tile_stored(0, dots, kStride);
  _tile_stored(1, dots + 16, kStride);
  if (both_halves) {
    _tile_stored(2, dots + 16 * 32, kStride);
    _tile_stored(3, dots + 16 * 32 + 16, kStride);
  }
  asm volatile("" : : : "memory");
}

// All rows against pairs of panels, 32 rows at a time: tiles of 16 rows x 64 values of k by 64 x 16 columns.
void multiply_int8_tiles(const Task& task) {
  constexpr int kStride = 2 * kPanelWidth, kRows = 32;
  alignas(64) int32_t dots[kRows * kStride];
  float* sums = reinterpret_cast<float*>(dots);
  const int64_t num_rows = task.input.num_rows, row_bytes = task.input.row_bytes, depth = task.depth;
  for (int64_t panel = task.panel_begin; panel < task.panel_end; panel += 2) {
    const int group = panel + 1 < task.panel_end ? 2 : 1;
    const std::byte* left = task.panel(panel);
    const std::byte* right = task.panel(panel + group - 1);  // the same once more where there is no second
    for (int64_t row = 0; row < num_rows; row += kRows) {
      const int rows = static_cast<int>(num_rows - row < kRows ? num_rows - row : kRows);
      multiply_tiles(task.input_row(row), row_bytes, left, right, depth, rows > 16, row == 0 ? 2 * task.panel_bytes : 0,
                     dots);
      for (int r = 0; r < rows; ++r) {
        const Sums zero = first_sums<integer::kZero8>(task.input.negative_sums + row + r);
        const Floats scale = floats_of(task.input.scales[row + r]);
        for (int p = 0; p < group; ++p) {
          int32_t* at = dots + r * kStride + p * kPanelWidth;
          const Floats scales = load_floats((p == 0 ? left : right) + depth * kPanelWidth);
          const Sums sum = add(load_as<Sums>(at), zero);
          store_floats(sums + r * kStride + p * kPanelWidth, product(to_floats(sum), product(scales, scale)));
        }
      }
      finish(task, row, rows, panel, group, sums, kStride);
    }
  }
}

#endif

}  // namespace
}  // namespace llmopt::matmul
