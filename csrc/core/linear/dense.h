// float32 and bfloat16 weights with vectors: every input value is broadcast against 64 bytes of a panel, a "step" of
// the panel. Sums run over k in ascending order whatever the blocking, so a row's result does not depend on the others.
#pragma once

#include <utility>

#include "core/linear/finish.h"
#include "core/linear/kernels.h"
#include "core/simd.h"

namespace llmopt::matmul {
namespace {

constexpr int kStepBytes = 64;

// How many rows and panels have their sums in registers. Few rows: panels in flight hide the latency of the
// multiplications. Many rows: each loaded weight meets many rows. Sums are rows x panels x kVecs vectors.
struct Blocking {
  int few_rows, few_panels, many_rows, many_panels;
};

// One k: 16 floats.
struct Float32Op {
  static constexpr InputForm kForm = InputForm::kFloat32;
  static constexpr int kInputBytes = 4;  // of an input row per step
  static constexpr Blocking kBlocking = kLanes == 16  ? Blocking{4, 4, 12, 2}
                                        : kLanes == 8 ? Blocking{2, 2, 6, 1}
                                                      : Blocking{1, 2, 2, 1};
  using Input = Vec;
  struct Weights {
    Vec values[kVecs];
  };
  static LLMOPT_INLINE Weights load(const std::byte* step) {
    Weights weights;
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) weights.values[v] = load_as<Vec>(step + v * kLanes * 4);
    return weights;
  }
  static LLMOPT_INLINE Input broadcast(const std::byte* from) { return splat(load_as<float>(from)); }
  static LLMOPT_INLINE void multiply_add(const Weights& weights, const Input& input, Vec (&sum)[kVecs]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) sum[v] = input * weights.values[v] + sum[v];
  }
};

// A pair of k: 16 pairs of bfloat16, widened to float32; the input is float32.
struct WidenedBFloat16Op {
  static constexpr InputForm kForm = InputForm::kFloat32;
  static constexpr int kInputBytes = 8;
  static constexpr Blocking kBlocking = kLanes == 16  ? Blocking{4, 4, 12, 2}
                                        : kLanes == 8 ? Blocking{2, 2, 4, 1}
                                                      : Blocking{1, 2, 2, 1};
  struct Input {
    Vec even, odd;
  };
  struct Weights {
    Vec even[kVecs], odd[kVecs];
  };
  static LLMOPT_INLINE Weights load(const std::byte* step) {
    Weights weights;
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const auto pairs = load_as<WordVec>(step + v * kLanes * 4);
      weights.even[v] = floats(pairs << 16);
      weights.odd[v] = floats(pairs & 0xffff0000u);
    }
    return weights;
  }
  static LLMOPT_INLINE Input broadcast(const std::byte* from) {
    return {splat(load_as<float>(from)), splat(load_as<float>(from + 4))};
  }
  static LLMOPT_INLINE void multiply_add(const Weights& weights, const Input& input, Vec (&sum)[kVecs]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      sum[v] = input.even * weights.even[v] + sum[v];
      sum[v] = input.odd * weights.odd[v] + sum[v];
    }
  }
};

#if defined(__AVX512BF16__)
// A pair of k: products of bfloat16, added in float32.
struct BFloat16PairOp {
  static constexpr InputForm kForm = InputForm::kBFloat16;
  static constexpr int kInputBytes = 4;
  static constexpr Blocking kBlocking{4, 4, 12, 2};
  using Input = __m512bh;
  using Weights = __m512bh;
  static LLMOPT_INLINE Weights load(const std::byte* step) { return load_as<__m512bh>(step); }
  static LLMOPT_INLINE Input broadcast(const std::byte* from) {
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(load_as<int32_t>(from)));
  }
  static LLMOPT_INLINE void multiply_add(const Weights& weights, const Input& input, Vec (&sum)[kVecs]) {
    sum[0] = _mm512_dpbf16_ps(sum[0], input, weights);
  }
};
#endif

// sums[r][p * 16 ...] = products of kRows rows with kPanels panels. Fetches `ahead` bytes ahead: past the end of these
// panels come the next kPanels.
template <class Op, int kRows, int kPanels>
void multiply_block(const Task& task, const std::byte* rows, const std::byte* panel, float* sums, int64_t stride) {
  const int64_t row_bytes = task.input.row_bytes, panel_bytes = task.panel_bytes;
  Vec sum[kRows][kPanels][kVecs] = {};
  const int64_t next = panel_bytes - task.prefetch_bytes;
  int64_t offset = 0;
  for (int64_t ahead = task.prefetch_bytes, end = next; offset < panel_bytes;
       ahead += (kPanels - 1) * panel_bytes, end = panel_bytes) {
    for (; offset < end; offset += kStepBytes, rows += Op::kInputBytes) {
      typename Op::Weights weights[kPanels];
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        const std::byte* step = panel + p * panel_bytes + offset;
        __builtin_prefetch(step + ahead, 0, 3);
        weights[p] = Op::load(step);
      }
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const auto input = Op::broadcast(rows + r * row_bytes);
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) Op::multiply_add(weights[p], input, sum[r][p]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) store(sums + r * stride + p * kPanelWidth + v * kLanes, sum[r][p][v]);
    }
  }
}

using MultiplyBlock = void (*)(const Task&, const std::byte*, const std::byte*, float*, int64_t);

template <class Op, int kPanels, int... kIndex>
constexpr MultiplyBlock block_of(int num_rows, std::integer_sequence<int, kIndex...>) {
  constexpr MultiplyBlock table[] = {multiply_block<Op, kIndex + 1, kPanels>...};
  return table[num_rows - 1];
}

// The block of num_rows <= kRows rows and num_panels <= kPanels panels.
template <class Op, int kRows, int kPanels>
MultiplyBlock choose_block(int num_rows, int num_panels) {
  if constexpr (kPanels > 1) {
    if (num_panels < kPanels) return choose_block<Op, kRows, kPanels - 1>(num_rows, num_panels);
  }
  return block_of<Op, kPanels>(num_rows, std::make_integer_sequence<int, kRows>{});
}

template <class Op, int kRows, int kPanels>
void multiply_blocks(const Task& task) {
  // Panels that are finished together: an even number, as gate and up belong together.
  constexpr int kGroup = kPanels < 2 ? 2 : kPanels;
  constexpr int kStride = kGroup * kPanelWidth;
  alignas(64) float sums[kRows * kStride];
  const Finish finish = choose_finish(task.output);
  for (int64_t panel = task.panel_begin; panel < task.panel_end; panel += kGroup) {
    const int group = static_cast<int>(task.panel_end - panel < kGroup ? task.panel_end - panel : kGroup);
    for (int64_t row = 0; row < task.input.num_rows; row += kRows) {
      const int num_rows = static_cast<int>(task.input.num_rows - row < kRows ? task.input.num_rows - row : kRows);
      for (int p = 0; p < group; p += kPanels) {
        const auto block = choose_block<Op, kRows, kPanels>(num_rows, min(kPanels, group - p));
        block(task, task.input_row(row), task.panel(panel + p), sums + p * kPanelWidth, kStride);
      }
      finish(task, row, num_rows, panel, group, sums, kStride);
    }
  }
}

template <class Op>
void multiply_dense(const Task& task) {
  constexpr Blocking kBlocking = Op::kBlocking;
  if (task.input.num_rows <= kBlocking.few_rows) {
    multiply_blocks<Op, kBlocking.few_rows, kBlocking.few_panels>(task);
  } else {
    multiply_blocks<Op, kBlocking.many_rows, kBlocking.many_panels>(task);
  }
}

}  // namespace
}  // namespace llmopt::matmul
