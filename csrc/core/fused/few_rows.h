// y = x W^T for few rows, with W as it lies in memory, a row per output.
//
// kLanes sums are kept in registers: R outputs x T rows of x with R * T = kLanes, so that one transposing addition
// gives all of them. The R rows of W lie one after the other and are read as one stream; for more than T rows of x they
// are met again in the cache.
#pragma once

#include "core/fused/storage.h"
#include "llmopt/fused.h"

namespace llmopt::fused {
namespace {

// One vector of products: kPerStep values of a row of x and of a row of W.
struct Float32Dot {
  using Element = float;
  using Operand = Vec;
  static constexpr int kPerStep = kLanes;
  static LLMOPT_INLINE Operand load(const float* from) { return load_as<Vec>(from); }
  static LLMOPT_INLINE Operand load(const float* from, int num) { return load_first<Vec>(from, num); }
  static LLMOPT_INLINE Vec multiply_add(Operand a, Operand b, Vec sum) { return a * b + sum; }
};

#if defined(__AVX512BF16__)
struct BFloat16Dot {
  using Element = uint16_t;
  using Operand = __m512bh;
  static constexpr int kPerStep = 2 * kLanes;
  static LLMOPT_INLINE Operand load(const uint16_t* from) { return load_as<__m512bh>(from); }
  static LLMOPT_INLINE Operand load(const uint16_t* from, int num) {
    return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << num) - 1), from));
  }
  static LLMOPT_INLINE Vec multiply_add(Operand a, Operand b, Vec sum) { return _mm512_dpbf16_ps(sum, a, b); }
};
#else
struct BFloat16Dot {
  using Element = uint16_t;
  struct Operand {
    Vec even, odd;
  };
  static constexpr int kPerStep = 2 * kLanes;
  static LLMOPT_INLINE Operand split(WordVec pairs) { return {floats(pairs << 16), floats(pairs & 0xffff0000u)}; }
  static LLMOPT_INLINE Operand load(const uint16_t* from) { return split(load_as<WordVec>(from)); }
  static LLMOPT_INLINE Operand load(const uint16_t* from, int num) {
    uint16_t values[kPerStep] = {};
    std::memcpy(values, from, num * sizeof(uint16_t));
    return load(values);
  }
  static LLMOPT_INLINE Vec multiply_add(const Operand& a, const Operand& b, Vec sum) {
    return a.odd * b.odd + (a.even * b.even + sum);
  }
};
#endif

template <class Element>
struct FewRows {
  using Dot = std::conditional_t<sizeof(Element) == 2, BFloat16Dot, Float32Dot>;
  static constexpr int kCacheLine = 64;

  // Outputs [output, output + R) for the kRows rows of x from `row` on; the last weights stand in for those past `end`.
  template <int kRows>
  static LLMOPT_INLINE void block(const FewRowsArgs& args, int64_t row, int64_t output, int64_t end) {
    constexpr int kOutputs = kLanes / kRows;
    const auto* x = static_cast<const Element*>(args.x) + row * args.x_stride;
    const Element* weight[kOutputs];
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) {
      const int64_t place = output + o < end ? output + o : end - 1;
      weight[o] = static_cast<const Element*>(args.weight) + place * args.weight_stride;
    }
    const int64_t ahead = kOutputs * args.weight_stride;
    Vec sums[kLanes] = {};
    int64_t k = 0;
    for (; k + Dot::kPerStep <= args.num_inputs; k += Dot::kPerStep) {
      typename Dot::Operand rows[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) rows[r] = Dot::load(x + r * args.x_stride + k);
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) {
        __builtin_prefetch(weight[o] + k + ahead, 0, 3);
        const auto values = Dot::load(weight[o] + k);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          sums[r * kOutputs + o] = Dot::multiply_add(values, rows[r], sums[r * kOutputs + o]);
        }
      }
    }
    if (k < args.num_inputs) {
      const int num = static_cast<int>(args.num_inputs - k);
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) {
        const auto values = Dot::load(weight[o] + k, num);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          sums[r * kOutputs + o] =
              Dot::multiply_add(values, Dot::load(x + r * args.x_stride + k, num), sums[r * kOutputs + o]);
        }
      }
    }
    float totals[kLanes];
    store(totals, sum_each(sums));
    const auto num_outputs = static_cast<int>(end - output < kOutputs ? end - output : kOutputs);
    for (int r = 0; r < kRows; ++r) {
      Element* out = static_cast<Element*>(args.out) + (row + r) * args.num_outputs + output;
      Vec y = load_first<Vec>(totals + r * kOutputs, num_outputs);
      if (args.bias) y += load_vec(static_cast<const Element*>(args.bias) + output, num_outputs);
      store_vec(out, y, num_outputs);
    }
  }

  template <int kRows>
  static void blocks(const FewRowsArgs& args, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end) {
    constexpr int kOutputs = kLanes / kRows;
    for (int64_t output = begin; output < end; output += kOutputs) {
      for (int64_t row = row_begin; row < row_end; row += kRows) block<kRows>(args, row, output, end);
    }
  }

  static void run(const FewRowsArgs& args, int64_t begin, int64_t end) {
    const int64_t fours = args.num_rows / 4 * 4, rest = args.num_rows - fours;
    if (fours) blocks<4>(args, 0, fours, begin, end);
    if (rest & 2) blocks<2>(args, fours, fours + 2, begin, end);
    if (rest & 1) blocks<1>(args, args.num_rows - 1, args.num_rows, begin, end);
  }
};

}  // namespace
}  // namespace llmopt::fused
