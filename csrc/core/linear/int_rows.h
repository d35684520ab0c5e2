// Driver of the integer kernels without tiles: blocks of up to 8 rows against one panel, whose sums stay in registers.
#pragma once

#include <utility>

#include "core/linear/columns.h"
#include "core/linear/finish.h"
#include "core/linear/kernels.h"

namespace llmopt::matmul {
namespace {

#if defined(__AVX512F__)
constexpr int kIntRows = 8;
#elif defined(__AVX2__)
constexpr int kIntRows = 4;
#else
constexpr int kIntRows = 1;
#endif

// Row r of `x` against one panel: sums[r * stride ... + 16].
using MultiplyRows = void (*)(const Task& task, const std::byte* panel, int64_t row, int64_t ahead, float* sums,
                              int64_t stride);

template <class Format, int... kIndex>
constexpr MultiplyRows rows_of(int num_rows, std::integer_sequence<int, kIndex...>) {
  constexpr MultiplyRows table[] = {Format::template multiply<kIndex + 1>...};
  return table[num_rows - 1];
}

template <class Format>
void multiply_int_rows(const Task& task) {
  constexpr int kGroup = 2;  // panels that are finished together: gate and up
  constexpr int kStride = kGroup * kPanelWidth, kRows = Format::kMaxRows;
  alignas(64) float sums[kRows * kStride];
  const int64_t num_rows = task.input.num_rows;
  for (int64_t panel = task.panel_begin; panel < task.panel_end; panel += kGroup) {
    const int group = static_cast<int>(task.panel_end - panel < kGroup ? task.panel_end - panel : kGroup);
    for (int64_t row = 0; row < num_rows; row += kRows) {
      const int rows = static_cast<int>(num_rows - row < kRows ? num_rows - row : kRows);
      const MultiplyRows multiply = rows_of<Format>(rows, std::make_integer_sequence<int, kRows>{});
      for (int p = 0; p < group; ++p) {
        multiply(task, task.panel(panel + p), row, task.prefetch_bytes, sums + p * kPanelWidth, kStride);
      }
      finish(task, row, rows, panel, group, sums, kStride);
    }
  }
}

LLMOPT_INLINE const int8_t* int8_row(const Task& task, int64_t row) {
  return reinterpret_cast<const int8_t*>(task.input_row(row));
}

}  // namespace
}  // namespace llmopt::matmul
