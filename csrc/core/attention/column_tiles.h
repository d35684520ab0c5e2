// Many query rows in AMX tiles, keys read in place: flash attention with everything transposed, so that the softmax of
// a row runs along vectors, never across one.
//
//   for each chunk of keys
//     pack V into values^T                 [column][keys], the tile on the left of the second product
//     for each group of 32 rows
//       scores^T[key][row] = K Q^T         K on the left as it lies in the cache, queries packed once
//       p = exp2(scores - reference)       vectors of 16 rows; pairs of keys are rounded to bfloat16 side by side,
//       which
//                                          is the form of the tile on the right
//       acc^T[column][row] += V^T p
//
// The reference of a row is a maximum that it has seen. It follows the running maximum only when that has grown by more
// than kLag: a probability of 2^kLag is as precise as one of 1, and most rescaling falls away.
#pragma once

#include "core/attention/kernels.h"
#include "core/attention/key_chunk.h"
#include "core/attention/softmax.h"
#include "core/attention/storage.h"

namespace llmopt::attention {
namespace {

constexpr int kColumnTileKeys = 128;  // keys of a chunk
constexpr int kGroupRows = 32;
constexpr int kStepKeys = 32;  // keys of a round of tiles
constexpr float kLag = 8;

// The workspace of a task.
struct ColumnTileBuffers {
  uint32_t* query;      // [rows / 16, head_dim / 2 pairs of numbers, 16 rows]
  float* scores;        // [2, kColumnTileKeys, 16 rows]
  uint32_t* probs;      // [2, kColumnTileKeys / 2 pairs of keys, 16 rows]
  uint32_t* values;     // [head_dim_v / 16, kColumnTileKeys / 32, 16 columns, 16 pairs of keys]
  float* accumulators;  // [rows / 16, head_dim_v, 16 rows]

  // With base == nullptr only the size is of use.
  size_t place(std::byte* base, int rows, int head_dim, int head_dim_v) {
    size_t size = 0;
    auto take = [&]<class T>(T*& pointer, int64_t count) {
      pointer = reinterpret_cast<T*>(base + size);
      size += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    };
    const int64_t padded_rows = round_up(rows, kGroupRows);
    take(query, padded_rows * head_dim / 2);
    take(scores, kColumnTileKeys * kGroupRows);
    take(probs, kColumnTileKeys / 2 * kGroupRows);
    take(values, kColumnTileKeys / 2 * head_dim_v);
    take(accumulators, padded_rows * head_dim_v);
    return size;
  }
};

inline size_t column_tile_workspace_bytes(int rows, int head_dim, int head_dim_v) {
  return ColumnTileBuffers().place(nullptr, rows, head_dim, head_dim_v);
}

using ColumnTileChunk = KeyChunk<kColumnTileKeys>;

// 2^x for x <= kLag. Relative error 8e-5; 2^-infinity is zero.
LLMOPT_INLINE Vec exp2_scaled(Vec x) {
  const Vec fraction = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
  Vec p = splat(0.07802454823f);
  p = p * fraction + splat(0.22606716f);
  p = p * fraction + splat(0.69583354f);
  p = p * fraction + splat(0.99992521f);
  return _mm512_scalef_ps(p, x);
}

// query^T; rows that are not there are zeros.
inline void pack_query_columns(const Task& task, int num_rows, uint32_t* to) {
  const int depth = task.head_dim / 2;
  for (int r = 0; r < round_up(num_rows, kGroupRows); r += kLanes, to += depth * kLanes) {
    for (int d = 0; d < depth; d += kLanes) {
      WordVec v[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int row = r + i;
        v[i] = row < num_rows ? load_as<WordVec>(static_cast<const uint16_t*>(task.query) +
                                                 (row / task.group) * task.query_token_stride +
                                                 (row % task.group) * task.query_head_stride + 2 * d)
                              : WordVec{};
      }
      transpose(v);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(to + (d + i) * kLanes, v[i]);
    }
  }
}

// values^T of a chunk; zeros for keys outside of its range.
inline void pack_value_columns(const Task& task, const ColumnTileChunk& chunk, uint32_t* values) {
  constexpr int kTile = 16 * kLanes, kTiles = kColumnTileKeys / 32;
  const int64_t stride = task.head_dim_v;
  for (int j = chunk.begin / 32 * 32; j < chunk.end; j += 32) {
    const bool whole = chunk.begin <= j && j + 32 <= chunk.end;
    for (int c = 0; c < task.head_dim_v; c += 32) {
      WordVec low[kLanes], high[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const uint16_t* from = chunk.values[j / 16 + i / 8] + (2 * i % 16) * stride + c;
        __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + stride);
        if (!whole) {
          const int key = j + 2 * i;
          if (key < chunk.begin || key >= chunk.end) a = __m512i{};
          if (key + 1 < chunk.begin || key + 1 >= chunk.end) b = __m512i{};
        }
        low[i] = reinterpret_cast<WordVec>(_mm512_unpacklo_epi16(a, b));
        high[i] = reinterpret_cast<WordVec>(_mm512_unpackhi_epi16(a, b));
      }
      transpose(low);
      transpose(high);
      uint32_t* to = values + (c / 16 * kTiles + j / 32) * kTile;
      // Number 4 q + m of the low halves is column 8 q + m, that of the high halves is column 8 q + 4 + m.
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const int column = i / 4 * 8 + i % 4;
        store(to + column / 16 * kTiles * kTile + column % 16 * kLanes, low[i]);
        store(to + (column + 4) / 16 * kTiles * kTile + (column + 4) % 16 * kLanes, high[i]);
      }
    }
  }
}

// scores^T of the step of keys from j on. Tiles 0-3: sums, 4-5: keys, 6-7: queries.
LLMOPT_INLINE void score_step(const Task& task, const ColumnTileChunk& chunk, int j, const uint32_t* query,
                              float* scores) {
  const int64_t stride = task.head_dim * 2;
  const uint16_t *keys = chunk.keys[j / 16], *keys2 = chunk.keys[j / 16 + 1];
  const uint32_t* query2 = query + task.head_dim / 2 * kLanes;
  float* out = scores + j * kLanes;
  float* out2 = out + kColumnTileKeys * kLanes;
  asm volatile("" : : : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int d = 0; d < task.head_dim; d += 32) {
    _tile_loadd(4, keys + d, stride);
    _tile_loadd(6, query + d / 2 * kLanes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, query2 + d / 2 * kLanes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, keys2 + d, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out2, 64);
  _tile_stored(2, out + 16 * kLanes, 64);
  _tile_stored(3, out2 + 16 * kLanes, 64);
  asm volatile("" : : : "memory");
}

// The same for all steps, with queries of 64 numbers, which stay in tiles. Tiles 0-1: sums, 2-3: keys, 4-7: queries.
LLMOPT_INLINE void score_group_64(const ColumnTileChunk& chunk, int low, int high, const uint32_t* query,
                                  float* scores) {
  asm volatile("" : : : "memory");
  _tile_loadd(4, query, 64);
  _tile_loadd(5, query + 16 * kLanes, 64);
  _tile_loadd(6, query + 32 * kLanes, 64);
  _tile_loadd(7, query + 48 * kLanes, 64);
  for (int j = low; j < high; j += 16) {
    const uint16_t* keys = chunk.keys[j / 16];
    float* out = scores + j * kLanes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(2, keys, 128);
    _tile_dpbf16ps(0, 2, 4);
    _tile_dpbf16ps(1, 2, 6);
    _tile_loadd(3, keys + 32, 128);
    _tile_dpbf16ps(0, 3, 5);
    _tile_dpbf16ps(1, 3, 7);
    _tile_stored(0, out, 64);
    _tile_stored(1, out + kColumnTileKeys * kLanes, 64);
  }
  asm volatile("" : : : "memory");
}

// acc^T[column ... column + 32) += V^T p over the keys [low, high). Tiles 0-3: sums, 4-5: values, 6-7: probabilities.
LLMOPT_INLINE void add_value_step(const Task& task, const ColumnTileBuffers& buffers, int low, int high, int column,
                                  float* acc) {
  constexpr int kTile = 16 * kLanes, kTiles = kColumnTileKeys / 32;
  const uint32_t *values = buffers.values + column / 16 * kTiles * kTile, *values2 = values + kTiles * kTile;
  const uint32_t *probs = buffers.probs, *probs2 = probs + kColumnTileKeys / 2 * kLanes;
  float* out = acc + column * kLanes;
  float* out2 = out + task.head_dim_v * kLanes;
  asm volatile("" : : : "memory");
  _tile_loadd(0, out, 64);
  _tile_loadd(1, out2, 64);
  _tile_loadd(2, out + 16 * kLanes, 64);
  _tile_loadd(3, out2 + 16 * kLanes, 64);
  for (int j = low; j < high; j += 32) {
    _tile_loadd(4, values + j / 32 * kTile, 64);
    _tile_loadd(6, probs + j / 2 * kLanes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, probs2 + j / 2 * kLanes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, values2 + j / 32 * kTile, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out2, 64);
  _tile_stored(2, out + 16 * kLanes, 64);
  _tile_stored(3, out2 + 16 * kLanes, 64);
  asm volatile("" : : : "memory");
}

// What a row sees of a chunk.
LLMOPT_INLINE int visible_end(const Task& task, const ColumnTileChunk& chunk, int first_key, int row) {
  return max(0, min(chunk.end, task.first_position + row / task.group + 1 - first_key));
}
LLMOPT_INLINE int visible_begin(const Task& task, const ColumnTileChunk& chunk, int first_key, int row) {
  if (task.sliding_window == 0) return chunk.begin;
  return max(chunk.begin, task.first_position + row / task.group + 1 - first_key - task.sliding_window);
}

// The same for 16 rows, one per lane.
struct RowIntervals {
  IntVec begin, end;
  int whole_begin, whole_end;  // every row sees these

  RowIntervals(const Task& task, const ColumnTileChunk& chunk, int first_key, int row) {
    whole_begin = visible_begin(task, chunk, first_key, row + kLanes - 1);
    whole_end = visible_end(task, chunk, first_key, row);
    if (whole_end == chunk.end && whole_begin == chunk.begin) {
      begin = IntVec{} + whole_begin;
      end = IntVec{} + whole_end;
      return;
    }
    for (int i = 0; i < kLanes; ++i) {
      end[i] = visible_end(task, chunk, first_key, row + i);
      begin[i] = visible_begin(task, chunk, first_key, row + i);
    }
  }
};

// Scores of 16 rows in [low, high) become probabilities; the rows' references, sums and accumulators follow.
LLMOPT_INLINE void softmax_columns(const Task& task, const SoftmaxScale& scale, const RowIntervals& seen, int row,
                                   float* scores, uint32_t* probs, float* acc, int low, int high) {
  if (scale.capped) {
    for (int j = low; j < high; ++j) {
      float* at = scores + j * kLanes;
      store(at, tanh(load_as<Vec>(at) * scale.cap_in) * scale.cap_out);
    }
  }
  auto hide = [&](int j) {
    const Vec score = load_as<Vec>(scores + j * kLanes);
    store(scores + j * kLanes, select((seen.begin <= j) & (seen.end > j), score, splat(kNegativeInfinity)));
  };
  for (int j = low; j < min(high, seen.whole_begin); ++j) hide(j);
  for (int j = max(low, seen.whole_end); j < high; ++j) hide(j);

  Vec best[4] = {splat(kNegativeInfinity), splat(kNegativeInfinity), splat(kNegativeInfinity),
                 splat(kNegativeInfinity)};
  for (int j = low; j < high; j += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) best[i] = larger(load_as<Vec>(scores + (j + i) * kLanes), best[i]);
  }
  const Vec factor = splat(scale.factor);
  const Vec top = larger(larger(best[0], best[1]), larger(best[2], best[3])) * factor;
  const Vec old = load_as<Vec>(task.row_max + row);
  const __mmask16 moves = _mm512_cmp_ps_mask(top, old + splat(kLag), _CMP_GT_OQ);
  const Vec reference = _mm512_mask_mov_ps(old, moves, top);
  // Nothing seen so far: any finite number will do, the probabilities are zeros.
  const __mmask16 unseen = _mm512_cmp_ps_mask(reference, splat(kNegativeInfinity), _CMP_EQ_OQ);
  const Vec shift = _mm512_mask_mov_ps(reference, unseen, Vec{});

  Vec sum[4] = {};
  for (int j = low; j < high; j += 4) {
    const float* from = scores + j * kLanes;
    Vec p[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      p[i] = exp2_scaled(load_as<Vec>(from + i * kLanes) * factor - shift);
      sum[i] += p[i];
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      // Rounded to nearest; ties, away from zero.
      const WordVec even = words(p[2 * i]) + 0x8000, odd = words(p[2 * i + 1]) + 0x8000;
      _mm512_store_si512(
          probs + (j / 2 + i) * kLanes,
          _mm512_mask_blend_epi16(0xaaaaaaaa, reinterpret_cast<__m512i>(even >> 16), reinterpret_cast<__m512i>(odd)));
    }
  }
  const Vec total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  const Vec old_sum = load_as<Vec>(task.row_sum + row);
  if (moves) {
    // The first reference replaces -infinity, which gives zero.
    const Vec rescale = _mm512_mask_mov_ps(splat(1), moves, exp2_nonpositive<true>(old - reference));
    const Vec exact = _mm512_mask_mov_ps(rescale, _mm512_cmp_ps_mask(old, splat(kNegativeInfinity), _CMP_EQ_OQ), Vec{});
    for (int c = 0; c < task.head_dim_v; ++c) store(acc + c * kLanes, load_as<Vec>(acc + c * kLanes) * exact);
    store(task.row_max + row, reference);
    store(task.row_sum + row, old_sum * exact + total);
  } else {
    store(task.row_sum + row, old_sum + total);
  }
}

// head_dim and head_dim_v are multiples of 32, block_size is one of 16.
inline void attend_column_tiles(const Task& task) {
  const int num_rows = task.num_q * task.group;
  ColumnTileBuffers buffers;
  buffers.place(task.workspace, num_rows, task.head_dim, task.head_dim_v);
  const int padded_rows = static_cast<int>(round_up(num_rows, kGroupRows));
  pack_query_columns(task, num_rows, buffers.query);
  std::memset(buffers.accumulators, 0, padded_rows * task.head_dim_v * sizeof(float));
  for (int r = 0; r < padded_rows; ++r) {
    task.row_max[r] = kNegativeInfinity;
    task.row_sum[r] = 0;
  }

  SoftmaxScale scale(task);
  if (scale.factor == 0) {
    // Hidden scores are -infinity, which a factor of zero would turn into NaN.
    std::memset(buffers.query, 0, padded_rows * task.head_dim * sizeof(uint16_t));
    scale.factor = 1;
  }
  ColumnTileChunk chunk;
  // 16 keys from a multiple of 16 on lie in one block.
  for (int first = task.key_begin / 16 * 16; first < task.key_end; first += kColumnTileKeys) {
    chunk.locate(task, first, task.key_begin, task.key_end);
    pack_value_columns(task, chunk, buffers.values);
    for (int r = 0; r < padded_rows; r += kGroupRows) {
      // Rows are in the order of their positions: the first sees the earliest key, the last the latest.
      const int low = visible_begin(task, chunk, first, r) / kStepKeys * kStepKeys;
      const int high = static_cast<int>(round_up(visible_end(task, chunk, first, r + kGroupRows - 1), kStepKeys));
      if (low >= high) continue;
      const uint32_t* query = buffers.query + r * (task.head_dim / 2);
      float* acc = buffers.accumulators + r * task.head_dim_v;
      if (task.head_dim == 64) {
        score_group_64(chunk, low, high, query, buffers.scores);
      } else {
        for (int j = low; j < high; j += kStepKeys) score_step(task, chunk, j, query, buffers.scores);
      }
      for (int half = 0; half < 2; ++half) {
        softmax_columns(task, scale, RowIntervals(task, chunk, first, r + half * kLanes), r + half * kLanes,
                        buffers.scores + half * kColumnTileKeys * kLanes,
                        buffers.probs + half * kColumnTileKeys / 2 * kLanes, acc + half * task.head_dim_v * kLanes, low,
                        high);
      }
      for (int c = 0; c < task.head_dim_v; c += 32) add_value_step(task, buffers, low, high, c, acc);
    }
  }

  for (int r = 0; r < num_rows; r += kLanes) {
    const float* from = buffers.accumulators + r * task.head_dim_v;
    for (int c = 0; c < task.head_dim_v; c += kLanes) {
      WordVec v[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) v[i] = load_as<WordVec>(from + (c + i) * kLanes);
      transpose(v);
      for (int i = 0; i < min(kLanes, num_rows - r); ++i) {
        store(reinterpret_cast<uint32_t*>(task.accumulator + (r + i) * task.accumulator_stride + c), v[i]);
      }
    }
  }
}

}  // namespace
}  // namespace llmopt::attention
