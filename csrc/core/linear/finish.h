// What happens to finished sums: bias, activation, scale, and the way to the output.
#pragma once

#include "core/activations.h"
#include "core/linear/kernels.h"
#include "core/simd.h"

namespace llmopt::matmul {
namespace {

using namespace simd;  // NOLINT: internal linkage, kernel sources only

constexpr int kVecs = kPanelWidth / kLanes;  // vectors in one row of a panel

template <Activation kActivation>
LLMOPT_INLINE Vec activate(Vec x) {
  const Vec zero = splat(0.0f);
  if constexpr (kActivation == Activation::kSilu) {
    return x * sigmoid(x);
  } else if constexpr (kActivation == Activation::kGelu) {
    return gelu(x);
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    return gelu_tanh(x);
  } else if constexpr (kActivation == Activation::kRelu) {
    return select(x < zero, zero, x);  // NaN stays
  } else if constexpr (kActivation == Activation::kReluSquared) {
    const Vec positive = select(x < zero, zero, x);
    return positive * positive;
  } else {
    return x;
  }
}

// One row of one panel to its place. num_columns < kPanelWidth in the last panel of a matrix.
template <class Element, bool kAdd>
LLMOPT_INLINE void put(const Vec (&y)[kVecs], Element* out, int num_columns) {
  Element whole[kPanelWidth];
  const bool is_partial = num_columns < kPanelWidth;
  Element* to = is_partial ? whole : out;
  if (is_partial && kAdd) std::memcpy(whole, out, num_columns * sizeof(Element));
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
    if constexpr (sizeof(Element) == 2) {
      store(to + v * kLanes, to_bfloat16(y[v]));
    } else {
      store(to + v * kLanes, kAdd ? load_as<Vec>(to + v * kLanes) + y[v] : y[v]);
    }
  }
  if (is_partial) std::memcpy(out, whole, num_columns * sizeof(Element));
}

template <Activation kActivation, class Element, bool kAdd, bool kGated>
void finish_as(const Task& task, int64_t row, int num_rows, int64_t panel, int num_panels, const float* sums,
               int64_t stride) {
  const LinearOutput& output = task.output;
  const Vec scale = splat(output.scale);
  constexpr int kStep = kGated ? 2 : 1;
  for (int p = 0; p < num_panels; p += kStep) {
    const int64_t first = (panel + p) * kPanelWidth;
    const auto num_columns = static_cast<int>(
        kGated ? kPanelWidth
               : (task.shape.num_outputs - first < kPanelWidth ? task.shape.num_outputs - first : kPanelWidth));
    Vec bias[kStep][kVecs] = {};
    if (output.bias) {
      for (int part = 0; part < kStep; ++part) {
        float values[kPanelWidth] = {};
        std::memcpy(values, output.bias + first + part * kPanelWidth, num_columns * sizeof(float));
        for (int v = 0; v < kVecs; ++v) bias[part][v] = load_as<Vec>(values + v * kLanes);
      }
    }
    Element* out = static_cast<Element*>(output.out) + row * output.row_stride + first / kStep;
    const float* from = sums + p * kPanelWidth;
    for (int r = 0; r < num_rows; ++r, out += output.row_stride, from += stride) {
      Vec y[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        y[v] = activate<kActivation>(load_as<Vec>(from + v * kLanes) + bias[0][v]);
        if constexpr (kGated) y[v] *= load_as<Vec>(from + kPanelWidth + v * kLanes) + bias[1][v];
        y[v] *= scale;
      }
      put<Element, kAdd>(y, out, num_columns);
    }
  }
}

using Finish = void (*)(const Task& task, int64_t row, int num_rows, int64_t panel, int num_panels, const float* sums,
                        int64_t stride);

template <Activation kActivation>
Finish finish_activated(const LinearOutput& output) {
  const bool is_half = output.dtype == DType::kBFloat16;
  switch (output.kind) {
    case LinearOutput::Kind::kAdd:
      return finish_as<kActivation, float, true, false>;
    case LinearOutput::Kind::kGated:
      return is_half ? finish_as<kActivation, uint16_t, false, true> : finish_as<kActivation, float, false, true>;
    default:
      return is_half ? finish_as<kActivation, uint16_t, false, false> : finish_as<kActivation, float, false, false>;
  }
}

// A function for sums[r][(p - panel) * 16 + c], the products of input row `row + r` with column c of panel p. For
// kGated, panel and num_panels are even.
inline Finish choose_finish(const LinearOutput& output) {
  switch (output.activation) {
    case Activation::kSilu:
      return finish_activated<Activation::kSilu>(output);
    case Activation::kGelu:
      return finish_activated<Activation::kGelu>(output);
    case Activation::kGeluTanh:
      return finish_activated<Activation::kGeluTanh>(output);
    case Activation::kRelu:
      return finish_activated<Activation::kRelu>(output);
    case Activation::kReluSquared:
      return finish_activated<Activation::kReluSquared>(output);
    default:
      return finish_activated<Activation::kNone>(output);
  }
}

inline void finish(const Task& task, int64_t row, int num_rows, int64_t panel, int num_panels, const float* sums,
                   int64_t stride) {
  choose_finish(task.output)(task, row, num_rows, panel, num_panels, sums, stride);
}

}  // namespace
}  // namespace llmopt::matmul
