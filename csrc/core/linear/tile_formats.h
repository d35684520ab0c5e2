// The formats of weights that tile_blocks.h multiplies.
#pragma once

#include "core/linear/int8.h"
#include "core/linear/tile_blocks.h"

namespace llmopt::matmul {
namespace {

#if defined(__AMX_BF16__)

struct BFloat16Tiles {
  static constexpr int kTileInputs = 32;
  static constexpr int kPlanes = 1;
  static LLMOPT_INLINE void dot_0_4_6() { _tile_dpbf16ps(0, 4, 6); }
  static LLMOPT_INLINE void dot_1_4_7() { _tile_dpbf16ps(1, 4, 7); }
  static LLMOPT_INLINE void dot_2_5_6() { _tile_dpbf16ps(2, 5, 6); }
  static LLMOPT_INLINE void dot_3_5_7() { _tile_dpbf16ps(3, 5, 7); }
  static LLMOPT_INLINE void to_floats(const Task&, int64_t, int, int64_t, int, float*, int64_t) {}
};

#endif

#if defined(__AMX_INT8__)

// A row's planes are neighbours: eight rows of the input are one tile, so few rows take no more tiles than one plane.
struct Int8Tiles {
  static constexpr int kTileInputs = 64;
  static constexpr int kPlanes = kInt16Planes;
  static LLMOPT_INLINE void dot_0_4_6() { _tile_dpbsud(0, 4, 6); }
  static LLMOPT_INLINE void dot_1_4_7() { _tile_dpbsud(1, 4, 7); }
  static LLMOPT_INLINE void dot_2_5_6() { _tile_dpbsud(2, 5, 6); }
  static LLMOPT_INLINE void dot_3_5_7() { _tile_dpbsud(3, 5, 7); }
  static LLMOPT_INLINE void to_floats(const Task& task, int64_t row, int num_rows, int64_t panel, int num_panels,
                                      float* sums, int64_t stride) {
    for (int p = 0; p < num_panels; ++p) {
      const Floats scales = int8_scales(task, task.panel(panel + p));
      float* at = sums + p * kPanelWidth;
      for (int r = 0; r < num_rows; ++r, at += kPlanes * stride) {
        const Sums high = add(load_as<Sums>(at), negative_zeros<integer::kZero8>(task, row + r, 0));
        const Sums low = add(load_as<Sums>(at + stride), negative_zeros<integer::kZero8>(task, row + r, 1));
        store_floats(at, int8_products(task, row + r, scales, high, low));
      }
    }
  }
};

#endif

}  // namespace
}  // namespace llmopt::matmul
