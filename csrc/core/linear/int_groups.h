// kInt8Group and kInt4Group with few rows: integers within 32 values of k, float32 across. Only for kernel sources.
//
//   y += w_scale * (x_scale * dot(q - zero, x)) [+ minimum * x_scale * sum(x)]
//
// int_tiles.h does the same operations in the same order, so the number of rows does not change a bit of the results.
#pragma once

#include "core/linear/int_rows.h"

namespace llmopt::matmul {
namespace {

struct ByteValues {
  static constexpr int kZero = kByteZero;
  static constexpr int kRowInputs = 4;  // values of k in 64 bytes
  template <int kRows>
  static LLMOPT_INLINE void dot(const std::byte* row, const int8_t* x, int64_t row_bytes, Sums (&sums)[kRows]) {
    const Bytes q = load_row(row);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums[r] = dot_bytes(sums[r], q, x + r * row_bytes);
  }
};

struct NibbleValues {
  static constexpr int kZero = integer::kZero4;
  static constexpr int kRowInputs = 8;
  template <int kRows>
  static LLMOPT_INLINE void dot(const std::byte* row, const int8_t* x, int64_t row_bytes, Sums (&sums)[kRows]) {
    const Bytes both = load_row(row), low = low_nibbles(both), high = high_nibbles(both);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sums[r] = dot_nibbles(sums[r], low, x + r * row_bytes);
      sums[r] = dot_nibbles(sums[r], high, x + r * row_bytes + 4);
    }
  }
};

// kInputs values of k (16 or 32) that share a scale of x: part = x_scale * dot, added to `part` unless it is the first.
template <class Values, int kInputs, int kZero, bool kFirst, int kRows>
LLMOPT_INLINE void add_part(const std::byte* values, int64_t ahead, const int8_t* x, int64_t row_bytes,
                            const float* x_scales, int64_t scale_stride, const int32_t* x_negative, int64_t sum_stride,
                            Floats (&part)[kRows]) {
  Sums sums[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sums[r] = first_sums<kZero>(x_negative + r * sum_stride);
#pragma GCC unroll 8
  for (int k = 0; k < kInputs; k += Values::kRowInputs) {
    const std::byte* row = values + k / Values::kRowInputs * 64;
    __builtin_prefetch(row + ahead, 0, 3);
    Values::template dot<kRows>(row, x + k, row_bytes, sums);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const Floats scale = floats_of(x_scales[r * scale_stride]), dot = to_floats(sums[r]);
    part[r] = kFirst ? product(dot, scale) : multiply_add(dot, scale, part[r]);
  }
}

// kGroup: values of k that share a scale of w.
template <class Values, int kGroup, bool kMinimum, int kRows>
void multiply_groups(const Task& task, const std::byte* panel, int64_t row, int64_t ahead, float* out, int64_t stride) {
  constexpr int64_t kValueBytes = kGroup / Values::kRowInputs * 64;
  constexpr int kChunk = kMinimum ? 1 : 2;
  constexpr int kInputs = kGroup < integer::kInputGroup ? kGroup : integer::kInputGroup;
  constexpr int kParts = kGroup / kInputs;
  constexpr int kZero = kMinimum ? 0 : Values::kZero;
  const int64_t row_bytes = task.input.row_bytes, scale_stride = task.input.scale_stride;
  const int64_t sum_stride = kInputs == 16 ? 2 * scale_stride : scale_stride;
  const int8_t* x = int8_row(task, row);
  const float* x_scales = task.input.scales + row * scale_stride;
  const float* x_sums = task.input.sums + row * scale_stride;
  const int32_t* x_negative =
      (kInputs == 16 ? task.input.negative_half_sums : task.input.negative_sums) + row * sum_stride;
  Floats y[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) y[r] = zero_floats();

  const auto add_group = [&](const std::byte* values, const std::byte* scales,
                             int in_chunk) __attribute__((always_inline)) {
    Floats part[kRows];
    add_part<Values, kInputs, kZero, true>(values, ahead, x, row_bytes, x_scales, scale_stride, x_negative, sum_stride,
                                           part);
#pragma GCC unroll 4
    for (int i = 1; i < kParts; ++i) {
      add_part<Values, kInputs, kZero, false>(values + i * (kValueBytes / kParts), ahead, x + i * kInputs, row_bytes,
                                              x_scales + i, scale_stride, x_negative + i, sum_stride, part);
    }
    const Floats scale = load_halves(scales);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) y[r] = multiply_add(part[r], scale, y[r]);
    if constexpr (kMinimum) {
      const Floats minimum = load_halves(scales + integer::kParameterBytes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < kParts; ++i) {
          y[r] = multiply_add(minimum, floats_of(x_sums[r * scale_stride + i]), y[r]);
        }
      }
    }
    x += kGroup;
    // Two groups of 16 have one scale of x.
    x_scales += kInputs == 16 ? in_chunk : kParts;
    x_negative += kParts;
    if constexpr (kMinimum) x_sums += kParts;
  };

  int64_t left = task.depth / kGroup;
  for (; left >= kChunk; left -= kChunk) {
    const std::byte* scales = panel + kChunk * kValueBytes;
    __builtin_prefetch(scales + ahead, 0, 3);
#pragma GCC unroll 2
    for (int i = 0; i < kChunk; ++i) {
      add_group(panel + i * kValueBytes, scales + i * integer::kParameterBytes, i);
    }
    panel = scales + 64;
  }
  if (left > 0) add_group(panel, panel + kValueBytes, 0);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) store_floats(out + r * stride, y[r]);
}

template <class Values, int kGroup, bool kMinimum>
struct Groups {
  static constexpr int kMaxRows = kIntRows;
  template <int kRows>
  static void multiply(const Task& task, const std::byte* panel, int64_t row, int64_t ahead, float* out,
                       int64_t stride) {
    multiply_groups<Values, kGroup, kMinimum, kRows>(task, panel, row, ahead, out, stride);
  }
};

inline void multiply_int8_group(const Task& task) {
  switch (task.shape.group_size) {
    case 16:
      return multiply_int_rows<Groups<ByteValues, 16, false>>(task);
    case 32:
      return multiply_int_rows<Groups<ByteValues, 32, false>>(task);
    case 64:
      return multiply_int_rows<Groups<ByteValues, 64, false>>(task);
    default:
      return multiply_int_rows<Groups<ByteValues, 128, false>>(task);
  }
}

template <bool kMinimum>
void multiply_int4(const Task& task) {
  switch (task.shape.group_size) {
    case 32:
      return multiply_int_rows<Groups<NibbleValues, 32, kMinimum>>(task);
    case 64:
      return multiply_int_rows<Groups<NibbleValues, 64, kMinimum>>(task);
    default:
      return multiply_int_rows<Groups<NibbleValues, 128, kMinimum>>(task);
  }
}
inline void multiply_int4_group(const Task& task) {
  return task.shape.has_minimum ? multiply_int4<true>(task) : multiply_int4<false>(task);
}

}  // namespace
}  // namespace llmopt::matmul
