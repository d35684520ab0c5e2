// Weights that AMX tiles read as they are packed (bfloat16, int8): 32 rows x 32 columns of sums in four tiles, two
// tiles of input and two of weights. A row of the input may be several rows of tiles, its planes.
//
//   panels are cut into groups, K into chunks: a chunk of a group stays in the second-level cache
//   for each group, for each chunk
//     for each 32 rows             the chunk of these rows stays in the first-level cache
//       for each pair of panels    sums in tiles; between chunks they wait in the scratch memory
//
// The finished sums of a block are written out while the next block multiplies, a few rows per tile of k: the vector
// units have nothing else to do then, and sums that the tile unit has just stored could not be read at once.
//
// Up to 32 rows read the weights once and fetch ahead of the reading. With more rows, each block fetches a bit of the
// weights that come next.
#pragma once

#if defined(__AMX_TILE__)

#include "core/linear/finish.h"
#include "core/linear/kernels.h"
#include "core/simd.h"

namespace llmopt::matmul {
namespace {

constexpr int kTileRows = 16;
constexpr int64_t kTileBytes = 1024;        // of weights: 64 bytes of k, 16 columns
constexpr int64_t kTileInputBytes = 64;     // of an input row
constexpr int64_t kChunkTiles = 20;         // of k: the input of 32 planes takes 40 KB
constexpr int64_t kGroupBytes = 200 << 10;  // of a group of panels
constexpr int64_t kMinGroupPanels = 8;      // matrices so deep that fewer would fit are first cut into chunks of K,
constexpr int64_t kBlockRows = 512;         // and the sums of so many planes wait in the scratch memory

constexpr int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int64_t kFewRows = 64;  // planes that read the weights pair by pair

// What a block fetches while it multiplies.
struct Fetch {
  // kAhead: so many bytes ahead of the reading. From a tile of k on, that is past the end of the panels; the next pair
  // comes `jump` bytes further.
  int64_t ahead = 0, ahead_tiles = 0, jump = 0;
  // Per tile of k: lines from each of two panels that are used later.
  const std::byte* later = nullptr;
  int later_lines = 0;
};

// What a format of weights and input has for the driver below:
//   kTileInputs           values of k in 64 bytes
//   kPlanes               rows of tiles that are one row of the input; they lie row_bytes / kPlanes apart
//   dot_0_4_6() ...       sums in tile 0 += input in tile 4 x weights in tile 6
//   to_floats(...)        the sums of a row's planes, as the tiles stored them, to float32 products in the first of
//   them

// Finished sums on their way to the output. Rows of the input.
template <class Format>
struct Pending {
  Finish finish = nullptr;
  const Task* task = nullptr;
  int64_t row = 0, panel = 0, stride = 0;
  int num_rows = 0, num_panels = 0;
  float* sums = nullptr;

  void write(int count) {
    if (num_rows == 0) return;
    count = min(count, num_rows);
    Format::to_floats(*task, row, count, panel, num_panels, sums, stride);
    finish(*task, row, count, panel, num_panels, sums, Format::kPlanes * stride);
    row += count;
    sums += count * Format::kPlanes * stride;
    num_rows -= count;
  }
};

// (Up to) 16 * kRowTiles planes x 16 * kPanels columns: sums (+)= input x panels, `num_tiles` tiles of k.
template <class Format, int kRowTiles, int kPanels, bool kAhead>
LLMOPT_INLINE void multiply_tile_block(const std::byte* input, int64_t plane_bytes, const std::byte* panel,
                                       int64_t panel_bytes, int64_t num_tiles, bool is_first, float* sums,
                                       int64_t stride_bytes, Fetch fetch, Pending<Format>& pending) {
  const int rows_per_tile = static_cast<int>((pending.num_rows + num_tiles - 1) / num_tiles);
  asm volatile("" : : : "memory");  // the tile intrinsics do not tell the compiler which memory they touch
  float* lower = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(sums) + kTileRows * stride_bytes);
  const std::byte* lower_input = input + kTileRows * plane_bytes;
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
    // Weights pass by: the hint keeps them from displacing the input, which is used again, in the first-level cache.
    _tile_stream_loadd(6, panel, 64);
    _tile_loadd(4, input, plane_bytes);
    if constexpr (kPanels == 2) _tile_stream_loadd(7, panel + panel_bytes, 64);
    if constexpr (kRowTiles == 2) _tile_loadd(5, lower_input, plane_bytes);
    Format::dot_0_4_6();
    if constexpr (kPanels == 2) Format::dot_1_4_7();
    if constexpr (kRowTiles == 2) Format::dot_2_5_6();
    if constexpr (kRowTiles == 2 && kPanels == 2) Format::dot_3_5_7();
    if constexpr (kAhead) {
      if (t == fetch.ahead_tiles) fetch.ahead += fetch.jump;
      const std::byte* ahead = panel + fetch.ahead;
#pragma GCC unroll 16
      for (int line = 0; line < 16; ++line) {
        __builtin_prefetch(ahead + line * 64, 0, 2);
        if constexpr (kPanels == 2) __builtin_prefetch(ahead + panel_bytes + line * 64, 0, 2);
      }
    }
    for (int line = 0; line < fetch.later_lines; ++line, fetch.later += 64) {
      __builtin_prefetch(fetch.later, 0, 2);
      __builtin_prefetch(fetch.later + panel_bytes, 0, 2);
    }
    pending.write(rows_per_tile);
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

template <bool kAhead, class Format>
LLMOPT_INLINE void multiply_any_tile_block(int row_tiles, int num_panels, const std::byte* input, int64_t plane_bytes,
                                           const std::byte* panel, int64_t panel_bytes, int64_t num_tiles,
                                           bool is_first, float* sums, int64_t stride_bytes, const Fetch& fetch,
                                           Pending<Format>& pending) {
  const auto call = [&]<int kRowTiles, int kPanels>() {
    multiply_tile_block<Format, kRowTiles, kPanels, kAhead>(input, plane_bytes, panel, panel_bytes, num_tiles, is_first,
                                                            sums, stride_bytes, fetch, pending);
  };
  if (num_panels == 2) {
    row_tiles == 2 ? call.template operator()<2, 2>() : call.template operator()<1, 2>();
  } else {
    row_tiles == 2 ? call.template operator()<2, 1>() : call.template operator()<1, 1>();
  }
}

// A pair of panels, or a last one alone, to the second-level cache: the first has room for the input only. There is
// room for twice of what the vector kernels fetch ahead.
inline Fetch fetch_ahead(const Task& task, int64_t num_tiles) {
  Fetch fetch;
  fetch.ahead = at_most(2 * task.prefetch_bytes, task.panel_bytes / 64 * 64);
  fetch.ahead_tiles = at_least(num_tiles - (fetch.ahead + kTileBytes - 1) / kTileBytes, 0);
  fetch.jump = task.panel_bytes;
  return fetch;
}

// Up to 32 planes: bound by the reading of the weights.
template <class Format>
void multiply_tiles_once(const Task& task) {
  const auto num_rows = static_cast<int>(task.input.num_rows);
  constexpr int64_t kStride = 2 * kPanelWidth;
  alignas(64) float sums[2 * kTileRows * kStride];
  const int64_t num_tiles = task.depth / Format::kTileInputs;
  const Fetch fetch = fetch_ahead(task, num_tiles);
  const Finish finish = choose_finish(task.output);
  Pending<Format> pending;
  for (int64_t panel = task.panel_begin; panel < task.panel_end; panel += 2) {
    const int num_panels = task.panel_end - panel < 2 ? 1 : 2;
    multiply_any_tile_block<true>(num_rows * Format::kPlanes > kTileRows ? 2 : 1, num_panels, task.input_row(0),
                                  task.input.row_bytes / Format::kPlanes, task.panel(panel), task.panel_bytes,
                                  num_tiles, true, sums, kStride * 4, fetch, pending);
    pending = {finish, &task, 0, panel, kStride, num_rows, num_panels, sums};
  }
  pending.write(num_rows);
}

// How many rows are taken through how many panels and how much of K at a time. Rows are planes here.
struct TilePlan {
  int64_t num_tiles, chunk_tiles;  // of k
  int64_t block_rows, group_panels;
  bool rows_outside;   // all chunks of 32 rows, then the next rows: sums of 32 rows wait. Else all rows of a chunk
  int64_t sum_stride;  // floats; 0: no sums wait

  TilePlan(const Task& task, int64_t num_rows, int tile_inputs) {
    num_tiles = task.depth / tile_inputs;
    const int64_t num_chunks = (num_tiles + kChunkTiles - 1) / kChunkTiles;
    chunk_tiles = (num_tiles + num_chunks - 1) / num_chunks;
    rows_outside = num_tiles * kTileBytes * kMinGroupPanels <= kGroupBytes;
    block_rows = rows_outside || num_chunks == 1 ? num_rows : kBlockRows;
    // Groups of even size, none much smaller than the others.
    const int64_t pairs = (task.panel_end - task.panel_begin + 1) / 2;
    const int64_t group_tiles = rows_outside ? num_tiles : chunk_tiles;
    const int64_t most_pairs = at_least(1, kGroupBytes / (2 * group_tiles * kTileBytes));
    const int64_t num_groups = (pairs + most_pairs - 1) / most_pairs;
    // Few rows are bound by the reading of the weights: all of them fetch the next pair while they use this one.
    group_panels = num_rows <= kFewRows ? 2 : (pairs + num_groups - 1) / num_groups * 2;
    // An odd number of cache lines: rows of a tile then fall into different sets of the cache.
    sum_stride = num_chunks == 1 ? 0 : group_panels * kPanelWidth + 16;
  }
  int64_t waiting_rows(int64_t num_rows) const {
    return rows_outside ? 2 * kTileRows : at_most(round_up(num_rows, 2 * kTileRows), block_rows);
  }
};

// One chunk of 32 planes through all panels of a group.
template <class Format>
struct TileSweep {
  const Task& task;
  const TilePlan& plan;
  int64_t row, num_rows, group, group_end, tile;  // row, num_rows: planes
  float* sums;                                    // of the first of these
  const std::byte* later;  // what the panels of the group will be replaced with, at the same distances; null: nothing
  int later_lines;
  Finish finish;
  Pending<Format>& pending;

  template <bool kAhead>
  void run() const {
    const int64_t num_tiles = at_most(plan.chunk_tiles, plan.num_tiles - tile);
    const int64_t plane_bytes = task.input.row_bytes / Format::kPlanes;
    const bool is_last = tile + num_tiles == plan.num_tiles;
    Fetch fetch;
    if constexpr (kAhead) fetch = fetch_ahead(task, num_tiles);
    fetch.later_lines = later ? later_lines : 0;
    for (int64_t panel = group; panel < group_end; panel += 2) {
      const int num_panels = group_end - panel < 2 ? 1 : 2;
      float* to = sums + (plan.sum_stride ? (panel - group) * kPanelWidth : 0);
      const int64_t stride = plan.sum_stride ? plan.sum_stride : 2 * kPanelWidth;
      fetch.later = later + (panel - group) * task.panel_bytes;
      multiply_any_tile_block<kAhead>(num_rows > kTileRows ? 2 : 1, num_panels,
                                      task.input.data + row * plane_bytes + tile * kTileInputBytes, plane_bytes,
                                      task.panel(panel) + tile * kTileBytes, task.panel_bytes, num_tiles, tile == 0, to,
                                      stride * 4, fetch, pending);
      if (!is_last) continue;
      pending = {finish,     &task, row / Format::kPlanes, panel, stride, static_cast<int>(num_rows / Format::kPlanes),
                 num_panels, to};
    }
  }
};

template <class Format>
void multiply_tiles(const Task& task) {
  const int64_t num_rows = task.input.num_rows * Format::kPlanes;
  if (num_rows <= 2 * kTileRows) return multiply_tiles_once<Format>(task);

  const TilePlan plan(task, num_rows, Format::kTileInputs);
  const int64_t sum_floats =
      plan.sum_stride ? plan.waiting_rows(num_rows) * plan.sum_stride : 2 * kTileRows * 2 * kPanelWidth;
  auto* sums = reinterpret_cast<float*>(task.scratch.at_least(sum_floats * sizeof(float)));

  const Finish finish = choose_finish(task.output);
  Pending<Format> pending;
  const auto sweep = [&](int64_t block, int64_t row, int64_t group, int64_t tile) {
    const int64_t block_end = at_most(block + plan.block_rows, num_rows);
    const int64_t steps = (block_end - block + 2 * kTileRows - 1) / (2 * kTileRows),
                  step = (row - block) / (2 * kTileRows);
    const int64_t group_end = at_most(group + plan.group_panels, task.panel_end);
    const int64_t tiles = at_most(plan.chunk_tiles, plan.num_tiles - tile);
    // These rows' share of the panels (or of the chunk) that come next.
    const std::byte* later = nullptr;
    if (plan.rows_outside || tile + tiles == plan.num_tiles) {
      if (group_end < task.panel_end) later = task.panel(group_end) + (plan.rows_outside ? tile * kTileBytes : 0);
    } else {
      later = task.panel(group) + (tile + tiles) * kTileBytes;
    }
    const int64_t lines = tiles * (kTileBytes / 64) * step / steps,
                  end = tiles * (kTileBytes / 64) * (step + 1) / steps;
    if (later) later += lines * 64;
    const TileSweep<Format> run{task,   plan,
                                row,    at_most(2 * kTileRows, block_end - row),
                                group,  group_end,
                                tile,   sums + (plan.rows_outside ? 0 : (row - block) * plan.sum_stride),
                                later,  static_cast<int>((end - lines + tiles - 1) / tiles),
                                finish, pending};
    const bool is_unseen = block == 0 && row == 0 && group == task.panel_begin && (plan.rows_outside || tile == 0);
    is_unseen ? run.template run<true>() : run.template run<false>();
  };
  for (int64_t block = 0; block < num_rows; block += plan.block_rows) {
    const int64_t block_end = at_most(block + plan.block_rows, num_rows);
    for (int64_t group = task.panel_begin; group < task.panel_end; group += plan.group_panels) {
      if (plan.rows_outside) {
        for (int64_t row = block; row < block_end; row += 2 * kTileRows) {
          for (int64_t tile = 0; tile < plan.num_tiles; tile += plan.chunk_tiles) sweep(block, row, group, tile);
        }
      } else {
        for (int64_t tile = 0; tile < plan.num_tiles; tile += plan.chunk_tiles) {
          for (int64_t row = block; row < block_end; row += 2 * kTileRows) sweep(block, row, group, tile);
        }
      }
    }
  }
  pending.write(pending.num_rows);
}

}  // namespace
}  // namespace llmopt::matmul
#endif
