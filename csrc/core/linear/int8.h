// kInt8: one scale per column, one per row of the input, whose values are 128 * high + low. The dot products of each
// plane with the weights are exact integers. Only for kernel sources.
#pragma once

#include "core/linear/int_rows.h"

namespace llmopt::matmul {
namespace {

constexpr int kInt16Planes = 2;  // of InputForm::kInt16Token: high, low

template <int kZero>
LLMOPT_INLINE Sums negative_zeros(const Task& task, int64_t row, int plane) {
  return first_sums<kZero>(task.input.negative_sums + kInt16Planes * row + plane);
}

LLMOPT_INLINE Floats int8_scales(const Task& task, const std::byte* panel) {
  return load_floats(panel + task.depth * kPanelWidth);
}

// What the sums of both planes are worth. Sums of up to 24 bits, those of 1,040 inputs and more, stay exact.
LLMOPT_INLINE Floats int8_products(const Task& task, int64_t row, Floats scales, Sums high, Sums low) {
  const Floats sums = multiply_add(to_floats(high), floats_of(128.0f), to_floats(low));
  return product(sums, product(scales, floats_of(task.input.scales[row])));
}

struct Int8Columns {
#if defined(__AVX512F__)
  static constexpr int kMaxRows = kIntRows;
#else
  static constexpr int kMaxRows = (kIntRows + 1) / 2;  // two planes of sums, in as many registers
#endif

  template <int kRows>
  static void multiply(const Task& task, const std::byte* panel, int64_t row, int64_t ahead, float* out,
                       int64_t stride) {
#if defined(__AVX2__)
    constexpr int kSplit = kRows == 1 ? 2 : 1;  // independent sums for the latency of a dot product
#else
    constexpr int kSplit = 1;
#endif
    const int64_t depth = task.depth, row_bytes = task.input.row_bytes, plane_bytes = row_bytes / kInt16Planes;
    const int8_t* x = int8_row(task, row);
    const std::byte* values = panel;
    Sums sums[kSplit][kRows][kInt16Planes];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int s = 0; s < kSplit; ++s) sums[s][r][0] = sums[s][r][1] = zero_sums();
    }
    for (int64_t k = 0; k < depth; k += 16, x += 16, values += 256) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        __builtin_prefetch(values + ahead + i * 64, 0, 3);
        const Bytes q = load_row(values + i * 64);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const int8_t* quad = x + r * row_bytes + 4 * i;
          Sums(&to)[kInt16Planes] = sums[i % kSplit][r];
          to[0] = dot_bytes(to[0], q, quad);
          to[1] = dot_bytes(to[1], q, quad + plane_bytes);
        }
      }
    }
    const Floats scales = int8_scales(task, panel);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Sums whole[kInt16Planes];
#pragma GCC unroll 2
      for (int p = 0; p < kInt16Planes; ++p) {
        whole[p] = kSplit == 2 ? add(sums[0][r][p], sums[kSplit - 1][r][p]) : sums[0][r][p];
        whole[p] = add(whole[p], negative_zeros<kByteZero>(task, row + r, p));
      }
      store_floats(out + r * stride, int8_products(task, row + r, scales, whole[0], whole[1]));
    }
  }
};

}  // namespace
}  // namespace llmopt::matmul
