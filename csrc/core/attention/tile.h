// Many query rows against packed keys and values: flash attention, bound by arithmetic.
//
//   for each tile of keys (64 to 256)
//     pack K and V into panels                        K^T: [panel][depth][keys], V: [panel][keys][columns]
//     for each group of rows
//       S = Q K^T          rows x keys in a small buffer that stays in the first-level cache
//       P = softmax(S)     running max and sum per row; the accumulator is rescaled when the max moved
//       acc += P V
//
// Groups skip the keys that none of their rows sees. What differs between instruction sets is in the `Compute` class:
// the packed formats and the two products.
#pragma once

#include <type_traits>

#include "core/attention/kernels.h"
#include "core/attention/panels.h"
#include "core/attention/quantized_rows.h"
#include "core/attention/softmax.h"
#include "core/attention/storage.h"

namespace llmopt::attention {
namespace {

constexpr int kMinTileKeys = 64, kMaxTileKeys = 256;
static_assert(kMaxTileKeys <= kMaxChunkKeys);
// Packed keys and values of a tile stay in the second-level cache next to queries and accumulators.
constexpr int kTileBytes = 128 << 10;

template <class Compute>
int tile_keys(int head_dim, int head_dim_v) {
  const int keys = kTileBytes / static_cast<int>((head_dim + head_dim_v) * sizeof(typename Compute::Packed));
  return max(kMinTileKeys, min(kMaxTileKeys, keys / kMinTileKeys * kMinTileKeys));
}

// Sizes and places of the buffers of a task in its workspace.
template <class Compute>
struct TileBuffers {
  using Packed = typename Compute::Packed;
  using Probability = typename Compute::Probability;

  int num_keys;          // per tile
  int64_t query_stride;  // elements of Packed
  int64_t score_stride;  // floats; odd multiple of a cache line, so that rows do not share cache sets
  int64_t prob_stride;
  Packed* query;                                 // [rows, query_stride]
  Packed* keys;                                  // [num_keys / kPanel, depth, kPanel]
  Packed* values;                                // [head_dim_v / kPanel, num_keys / kDepthUnit, kPanel]
  float* scores;                                 // [kRowGroup, score_stride]
  Probability* probs;                            // [kRowGroup, prob_stride]; the scores themselves in float32
  const typename Compute::Element** key_rows;    // [num_keys]
  const typename Compute::Element** value_rows;  // [num_keys]

  // With base == nullptr only the size is of use.
  size_t place(std::byte* base, int rows, int head_dim, int head_dim_v) {
    num_keys = tile_keys<Compute>(head_dim, head_dim_v);
    query_stride = Compute::depth_of(head_dim);
    score_stride = num_keys + 16;
    prob_stride = num_keys + 32;
    size_t size = 0;
    auto take = [&]<class T>(T*& pointer, int64_t count) {
      pointer = reinterpret_cast<T*>(base + size);
      size += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    };
    take(query, round_up(rows, Compute::kRowGroup) * query_stride);
    take(keys, num_keys * Compute::depth_of(head_dim));
    take(values, round_up(head_dim_v, kPanel) * num_keys / Compute::kDepthUnit);
    take(scores, Compute::kRowGroup * score_stride);
    if constexpr (std::is_same_v<Probability, float>) {
      probs = scores;
      prob_stride = score_stride;
    } else {
      take(probs, Compute::kRowGroup * prob_stride);
    }
    take(key_rows, num_keys);
    take(value_rows, num_keys);
    return size;
  }
};

template <class Compute>
size_t tile_workspace_bytes(int rows, int head_dim, int head_dim_v) {
  TileBuffers<Compute> buffers;
  return buffers.place(nullptr, rows, head_dim, head_dim_v);
}

// All that some rows see of a tile of keys.
inline Interval visible_keys_of_rows(const Task& task, int r, int num_rows, int first_key, int num_keys) {
  // In the order of their positions: the first sees the earliest key, the last the latest.
  if (!task.draft_masks) {
    return {visible_keys(task, r, first_key, 0, num_keys).begin,
            visible_keys(task, r + num_rows - 1, first_key, 0, num_keys).end};
  }
  Interval all{num_keys, 0};
  for (int i = r; i < r + num_rows; ++i) {
    const Interval seen = visible_keys(task, i, first_key, 0, num_keys);
    if (seen.begin < seen.end) all = {min(all.begin, seen.begin), max(all.end, seen.end)};
  }
  return all;
}

template <class Compute>
void attend_tile(const Task& task) {
  constexpr int kRowGroup = Compute::kRowGroup;
  const int num_rows = task.num_q * task.group;
  TileBuffers<Compute> buffers;
  buffers.place(task.workspace, num_rows, task.head_dim, task.head_dim_v);
  for (int r = 0; r < round_up(num_rows, kRowGroup); ++r) {
    const auto* row = r < num_rows
                          ? static_cast<const typename Compute::Element*>(task.query) +
                                (r / task.group) * task.query_token_stride + (r % task.group) * task.query_head_stride
                          : nullptr;
    Compute::pack_query(row, task.head_dim, buffers.query + r * buffers.query_stride);
  }
  start_rows(task, num_rows);

  const SoftmaxScale scale(task);
  for (int begin = task.key_begin; begin < task.key_end; begin += buffers.num_keys) {
    const int num_keys = min(buffers.num_keys, task.key_end - begin);
    locate(task, begin, num_keys, buffers.key_rows, buffers.value_rows);
    unpack_rows(task, num_keys, buffers.key_rows, buffers.value_rows);
    Compute::pack_keys(buffers.key_rows, num_keys, task.head_dim, buffers.keys);
    Compute::pack_values(buffers.value_rows, num_keys, buffers.num_keys, task.head_dim_v, buffers.values);

    for (int r = 0; r < num_rows; r += kRowGroup) {
      const int rows = min(kRowGroup, num_rows - r);
      const Interval seen = visible_keys_of_rows(task, r, rows, begin, num_keys);
      if (seen.end == 0 || seen.begin >= num_keys) continue;
      const int low = seen.begin / Compute::kDepthStep * Compute::kDepthStep;
      const int high = static_cast<int>(round_up(seen.end, Compute::kDepthStep));

      Compute::multiply_keys(buffers.query + r * buffers.query_stride, buffers.query_stride, rows, buffers.keys, low,
                             seen.end, task.head_dim, buffers.scores, buffers.score_stride);
      for (int i = 0; i < rows; ++i) {
        softmax_row<Compute::kExact>(task, scale, r + i, begin, visible_keys(task, r + i, begin, 0, num_keys),
                                     buffers.scores + i * buffers.score_stride, buffers.probs + i * buffers.prob_stride,
                                     low, high);
      }
      Compute::multiply_values(buffers.probs, buffers.prob_stride, rows, buffers.values, buffers.num_keys, low, high,
                               task.head_dim_v, task.accumulator + r * task.accumulator_stride,
                               task.accumulator_stride);
    }
  }
}

}  // namespace
}  // namespace llmopt::attention
