// bfloat16 weights with AMX tiles: 32 rows x 32 columns of sums in four tiles, two tiles of input and two of weights.
//
//   panels are cut into groups that stay in the second-level cache, K into chunks
//   for each group, for each chunk
//     for each 32 rows             the chunk of these rows stays in the first-level cache
//       for each pair of panels    sums in tiles; between chunks they wait in the scratch memory
//         after the last chunk: finish()
//
// Up to 32 rows read the weights once and fetch ahead of the reading. More rows fetch the next group bit by bit.
#pragma once

#if defined(__AMX_BF16__)

#include "core/linear/finish.h"
#include "core/linear/kernels.h"
#include "core/simd.h"

namespace llmopt::matmul {
namespace {

constexpr int kTileRows = 16;
constexpr int64_t kTileBytes = 1024;        // of weights: 32 values of k, 16 columns
constexpr int64_t kTileInputBytes = 64;     // of an input row
constexpr int64_t kChunkTiles = 20;         // of k: the input of 32 rows takes 40 KB
constexpr int64_t kGroupBytes = 384 << 10;  // of a chunk of a group of panels
constexpr int64_t kBlockRows = 1024;        // sums of so many rows wait in the scratch memory

constexpr int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// What is fetched during a block.
struct Fetch {
  int64_t ahead;           // bytes ahead of the reading in the same panels, kAhead only
  int64_t ahead_tiles;     // from this tile of k on, that is past the end of the panels...
  int64_t jump;            // ... and the next panels come so many bytes further
  const std::byte* next;   // another place, and
  int64_t lines_per_tile;  // how much of it per tile of k
};

// (Up to) 16 * kRowTiles rows x 16 * kPanels columns: sums (+)= input x panels, `num_tiles` tiles of k.
template <int kRowTiles, int kPanels, bool kAhead>
LLMOPT_INLINE void multiply_tile_block(const std::byte* input, int64_t row_bytes, const std::byte* panel,
                                       int64_t panel_bytes, int64_t num_tiles, bool is_first, float* sums,
                                       int64_t stride_bytes, Fetch fetch) {
  asm volatile("" : : : "memory");  // the tile intrinsics do not tell the compiler which memory they touch
  float* lower = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(sums) + kTileRows * stride_bytes);
  const std::byte* lower_input = input + kTileRows * row_bytes;
  if (is_first) {
    _tile_zero(0);
    if constexpr (kPanels == 2) _tile_zero(1);
    if constexpr (kRowTiles == 2) _tile_zero(2);
    if constexpr (kRowTiles == 2 && kPanels == 2) _tile_zero(3);
  } else {
    _tile_loadd(0, sums, stride_bytes);
    if constexpr (kPanels == 2) _tile_loadd(1, sums + kPanelWidth, stride_bytes);
    if constexpr (kRowTiles == 2) _tile_loadd(2, lower, stride_bytes);
    if constexpr (kRowTiles == 2 && kPanels == 2) _tile_loadd(3, lower + kPanelWidth, stride_bytes);
  }
  for (int64_t t = 0; t < num_tiles; ++t) {
    _tile_loadd(6, panel, 64);
    _tile_loadd(4, input, row_bytes);
    if constexpr (kPanels == 2) _tile_loadd(7, panel + panel_bytes, 64);
    if constexpr (kRowTiles == 2) _tile_loadd(5, lower_input, row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kPanels == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kRowTiles == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kRowTiles == 2 && kPanels == 2) _tile_dpbf16ps(3, 5, 7);
    if constexpr (kAhead) {
      if (t == fetch.ahead_tiles) fetch.ahead += fetch.jump;
      const std::byte* ahead = panel + fetch.ahead;
#pragma GCC unroll 16
      for (int line = 0; line < 16; ++line) {
        __builtin_prefetch(ahead + line * 64, 0, 3);
        if constexpr (kPanels == 2) __builtin_prefetch(ahead + panel_bytes + line * 64, 0, 3);
      }
    }
    for (int64_t line = 0; line < fetch.lines_per_tile; ++line, fetch.next += 64) __builtin_prefetch(fetch.next, 0, 2);
    panel += kTileBytes;
    input += kTileInputBytes;
    lower_input += kTileInputBytes;
  }
  _tile_stored(0, sums, stride_bytes);
  if constexpr (kPanels == 2) _tile_stored(1, sums + kPanelWidth, stride_bytes);
  if constexpr (kRowTiles == 2) _tile_stored(2, lower, stride_bytes);
  if constexpr (kRowTiles == 2 && kPanels == 2) _tile_stored(3, lower + kPanelWidth, stride_bytes);
  asm volatile("" : : : "memory");
}

template <bool kAhead>
LLMOPT_INLINE void multiply_any_tile_block(int row_tiles, int num_panels, const std::byte* input, int64_t row_bytes,
                                           const std::byte* panel, int64_t panel_bytes, int64_t num_tiles,
                                           bool is_first, float* sums, int64_t stride_bytes, const Fetch& fetch) {
  const auto call = [&](auto block) {
    block(input, row_bytes, panel, panel_bytes, num_tiles, is_first, sums, stride_bytes, fetch);
  };
  if (num_panels == 2) {
    row_tiles == 2 ? call(multiply_tile_block<2, 2, kAhead>) : call(multiply_tile_block<1, 2, kAhead>);
  } else {
    row_tiles == 2 ? call(multiply_tile_block<2, 1, kAhead>) : call(multiply_tile_block<1, 1, kAhead>);
  }
}

// Up to 32 rows: bound by the reading of the weights.
inline void multiply_tiles_once(const Task& task) {
  const auto num_rows = static_cast<int>(task.input.num_rows);
  constexpr int64_t kStride = 2 * kPanelWidth;
  alignas(64) float sums[2 * kTileRows * kStride];
  const int64_t num_tiles = task.depth / 32;
  const int64_t ahead_tiles = num_tiles - (task.prefetch_bytes + kTileBytes - 1) / kTileBytes;
  for (int64_t panel = task.panel_begin; panel < task.panel_end; panel += 2) {
    const int num_panels = task.panel_end - panel < 2 ? 1 : 2;
    const Fetch fetch{task.prefetch_bytes, at_least(ahead_tiles, 0), task.panel_bytes, nullptr, 0};
    multiply_any_tile_block<true>(num_rows > kTileRows ? 2 : 1, num_panels, task.input_row(0), task.input.row_bytes,
                                  task.panel(panel), task.panel_bytes, num_tiles, true, sums, kStride * 4, fetch);
    finish(task, 0, num_rows, panel, num_panels, sums, kStride);
  }
}

inline void multiply_tiles_bfloat16(const Task& task) {
  if (task.input.num_rows <= 2 * kTileRows) return multiply_tiles_once(task);

  const int64_t num_tiles = task.depth / 32;
  const int64_t num_chunks = (num_tiles + kChunkTiles - 1) / kChunkTiles;
  const int64_t chunk_tiles = (num_tiles + num_chunks - 1) / num_chunks;
  // Groups of even size, none much smaller than the others.
  const int64_t pairs = (task.panel_end - task.panel_begin + 1) / 2;
  const int64_t most_pairs = at_least(1, kGroupBytes / (2 * chunk_tiles * kTileBytes));
  const int64_t num_groups = (pairs + most_pairs - 1) / most_pairs;
  const int64_t group_panels = (pairs + num_groups - 1) / num_groups * 2;

  const int64_t stride = group_panels * kPanelWidth;  // floats
  const int64_t waiting_rows = num_chunks > 1 ? at_most(round_up(task.input.num_rows, 2 * kTileRows), kBlockRows) : 0;
  auto* sums = reinterpret_cast<float*>(
      task.scratch.at_least(at_least(waiting_rows * stride, 2 * kTileRows * 2 * kPanelWidth) * sizeof(float)));

  for (int64_t block = 0; block < task.input.num_rows; block += kBlockRows) {
    const int64_t block_end = at_most(block + kBlockRows, task.input.num_rows);
    const int64_t row_steps = (block_end - block + 2 * kTileRows - 1) / (2 * kTileRows);
    for (int64_t group = task.panel_begin; group < task.panel_end; group += group_panels) {
      const int64_t group_end = at_most(group + group_panels, task.panel_end);
      for (int64_t tile = 0; tile < num_tiles; tile += chunk_tiles) {
        const int64_t tiles = at_most(chunk_tiles, num_tiles - tile);
        const bool is_last = tile + tiles == num_tiles;
        for (int64_t row = block; row < block_end; row += 2 * kTileRows) {
          const auto num_rows = static_cast<int>(at_most(2 * kTileRows, block_end - row));
          for (int64_t panel = group; panel < group_end; panel += 2) {
            const int num_panels = group_end - panel < 2 ? 1 : 2;
            float* waiting = num_chunks > 1 ? sums + (row - block) * stride + (panel - group) * kPanelWidth : sums;
            const int64_t waiting_stride = num_chunks > 1 ? stride : 2 * kPanelWidth;
            const Fetch fetch{};
            multiply_any_tile_block<false>(num_rows > kTileRows ? 2 : 1, num_panels,
                                           task.input_row(row) + tile * kTileInputBytes, task.input.row_bytes,
                                           task.panel(panel) + tile * kTileBytes, task.panel_bytes, tiles, tile == 0,
                                           waiting, waiting_stride * 4, fetch);
            if (is_last) finish(task, row, num_rows, panel, num_panels, waiting, waiting_stride);
          }
        }
      }
      static_cast<void>(row_steps);
    }
  }
}

}  // namespace
}  // namespace llmopt::matmul
#endif
