// Packing into panels, and products of a few rows with a panel.
#pragma once

#include "core/attention/simd.h"
#include "core/attention/storage.h"

namespace llmopt::attention {
namespace {

// Columns of a panel: two vectors, so that each broadcast element of the left side meets two multiplications.
constexpr int kPanel = 2 * kLanes;
// Rows x 2 accumulators, two vectors of the panel and one of the left side fit the registers (32, or 16).
constexpr int kMicroRows = kLanes == 16 ? 12 : 6;

// Rows of words, transposed into panels: panels[(j / kPanel), d, j % kPanel] = row j's word d.
// `load(j, d)` gives kLanes words of row j from word d on, zeros past its end. Rows from num_rows on are zeros.
template <class Load>
LLMOPT_INLINE void pack_transposed(int num_rows, int64_t depth, uint32_t* panels, const Load& load) {
  for (int j = 0; j < num_rows; j += kLanes) {
    uint32_t* panel = panels + j / kPanel * depth * kPanel + j % kPanel;
    const int count = min(kLanes, num_rows - j);
    for (int d = 0; d < depth; d += kLanes) {
      WordVec v[kLanes];
      if (count == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) v[i] = load(j + i, d);
      } else {
        for (int i = 0; i < kLanes; ++i) v[i] = i < count ? load(j + i, d) : WordVec{};
      }
      transpose(v);
      if (d + kLanes <= depth) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(panel + (d + i) * kPanel, v[i]);
      } else {
        for (int i = 0; i < depth - d; ++i) store(panel + (d + i) * kPanel, v[i]);
      }
    }
  }
  // The second half of the last panel, when no row fell into it.
  if ((num_rows - 1) % kPanel < kLanes) {
    uint32_t* half = panels + (num_rows - 1) / kPanel * depth * kPanel + kLanes;
    for (int64_t d = 0; d < depth; ++d) store(half + d * kPanel, WordVec{});
  }
}

struct FloatOp {
  using Word = float;
  using Operand = Vec;
  static LLMOPT_INLINE Vec load(const float* from) { return load_as<Vec>(from); }
  static LLMOPT_INLINE Vec broadcast(const float* from) { return splat(*from); }
  static LLMOPT_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
};

#if defined(__AVX512BF16__)
// A word is a pair of bfloat16 that belong to neighbouring terms of the sum.
struct PairOp {
  using Word = uint32_t;
  using Operand = __m512bh;
  static LLMOPT_INLINE __m512bh load(const uint32_t* from) { return load_as<__m512bh>(from); }
  static LLMOPT_INLINE __m512bh broadcast(const uint32_t* from) {
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(*from)));
  }
  static LLMOPT_INLINE Vec multiply_add(__m512bh a, __m512bh b, Vec c) { return _mm512_dpbf16_ps(c, a, b); }
};
#endif

// out[r][0 .. kPanel) (+)= sum over d < depth of left[r][d] * panel[d][0 .. kPanel)
template <class Op, int kRows, bool kAdd>
void multiply_panel(const typename Op::Word* left, int64_t left_stride, const typename Op::Word* panel, int64_t depth,
                    float* out, int64_t out_stride) {
  if (depth <= 0) __builtin_unreachable();  // else the sums are kept twice
  Vec sum[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    sum[r][0] = kAdd ? load_as<Vec>(out + r * out_stride) : Vec{};
    sum[r][1] = kAdd ? load_as<Vec>(out + r * out_stride + kLanes) : Vec{};
  }
  for (int64_t d = 0; d < depth; ++d) {
    const auto p0 = Op::load(panel + d * kPanel), p1 = Op::load(panel + d * kPanel + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const auto l = Op::broadcast(left + r * left_stride + d);
      sum[r][0] = Op::multiply_add(l, p0, sum[r][0]);
      sum[r][1] = Op::multiply_add(l, p1, sum[r][1]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    store(out + r * out_stride, sum[r][0]);
    store(out + r * out_stride + kLanes, sum[r][1]);
  }
}

template <class Op, bool kAdd>
using MultiplyPanel = void (*)(const typename Op::Word*, int64_t, const typename Op::Word*, int64_t, float*, int64_t);

template <class Op, bool kAdd, int... kIndex>
constexpr MultiplyPanel<Op, kAdd> panel_kernel(int rows, std::integer_sequence<int, kIndex...>) {
  constexpr MultiplyPanel<Op, kAdd> table[] = {multiply_panel<Op, kIndex + 1, kAdd>...};
  return table[rows - 1];
}

// The same for any number of rows.
template <class Op, bool kAdd>
void multiply_rows(const typename Op::Word* left, int64_t left_stride, int rows, const typename Op::Word* panel,
                   int64_t depth, float* out, int64_t out_stride) {
  for (int r = 0; r < rows; r += kMicroRows) {
    const auto kernel =
        panel_kernel<Op, kAdd>(min(kMicroRows, rows - r), std::make_integer_sequence<int, kMicroRows>{});
    kernel(left + r * left_stride, left_stride, panel, depth, out + r * out_stride, out_stride);
  }
}

}  // namespace
}  // namespace llmopt::attention
