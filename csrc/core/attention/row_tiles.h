// Up to 16 query rows in AMX tiles, keys and values read in place and once (decoding, verification of drafts). Bound by
// the memory that keys and values come from: 16 rows take as long as one.
//
//   scores^T[key][row] = K Q^T      the tile on the left is 16 keys x 32 numbers, as they lie in the cache; queries are
//                                   packed once, in pairs of numbers
//   p = exp2(scores - running max)  row by row, rounded to bfloat16
//   acc[row][column] += P V         the tile on the right wants pairs of keys: two rows of V are interleaved by an
//                                   unpack of each half. That leaves the columns of 32 in another order, in which they
//                                   are accumulated; finish() puts them right
#pragma once

#include "core/attention/kernels.h"
#include "core/attention/key_chunk.h"
#include "core/attention/softmax.h"
#include "core/attention/storage.h"

namespace llmopt::attention {
namespace {

constexpr int kRowTileKeys = 128;  // keys between two updates of the running maximum
constexpr int kTileRows = kMaxTileRows;

// The workspace of a task.
struct RowTileBuffers {
  static constexpr int kScoreStride = kRowTileKeys + kLanes;
  static constexpr int kProbStride = kRowTileKeys + 2 * kLanes;
  // One pair more than there are, so that columns do not share cache sets.
  static constexpr int kValueStride = (kRowTileKeys / 2 + 1) * 16;

  uint32_t* query;    // [head_dim / 32, 16 pairs of numbers, 16 rows]
  float* transposed;  // [64 keys, 16 rows]
  float* scores;      // [16, kScoreStride]
  uint16_t* probs;    // [16, kProbStride], zeros in rows that are not there
  uint32_t* values;   // [head_dim_v / 16, kValueStride / 16 pairs of keys, 16 columns]

  // With base == nullptr only the size is of use.
  size_t place(std::byte* base, int head_dim, int head_dim_v) {
    size_t size = 0;
    auto take = [&]<class T>(T*& pointer, int64_t count) {
      pointer = reinterpret_cast<T*>(base + size);
      size += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    };
    take(query, head_dim / 2 * kTileRows);
    take(transposed, 64 * kTileRows);
    take(scores, kTileRows * kScoreStride);
    take(probs, kTileRows * kProbStride);
    take(values, head_dim_v / 16 * kValueStride);
    return size;
  }
};

inline size_t row_tile_workspace_bytes(int head_dim, int head_dim_v) {
  return RowTileBuffers().place(nullptr, head_dim, head_dim_v);
}

using RowTileChunk = KeyChunk<kRowTileKeys>;

// Columns [column, column + 32) of group i, in pairs of keys. Rows outside of [begin, end) become zeros.
LLMOPT_INLINE void interleave_values(const Task& task, const RowTileBuffers& buffers, const RowTileChunk& chunk, int i,
                                     int column) {
  if (column >= task.head_dim_v) return;
  const int64_t stride = task.head_dim_v;
  const uint16_t* from = chunk.values[i] + column;
  uint32_t* to = buffers.values + column / 16 * RowTileBuffers::kValueStride + i * 8 * 16;
  const int begin = chunk.begin - i * 16, end = chunk.end - i * 16;
  if (begin <= 0 && end >= 16) {
#pragma GCC unroll 8
    for (int j = 0; j < 16; j += 2, from += 2 * stride, to += 16) {
      const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + stride);
      _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(to + RowTileBuffers::kValueStride, _mm512_unpackhi_epi16(a, b));
    }
    return;
  }
  for (int j = 0; j < 16; j += 2, from += 2 * stride, to += 16) {
    const __m512i a = j >= begin && j < end ? _mm512_loadu_si512(from) : __m512i{};
    const __m512i b = j + 1 >= begin && j + 1 < end ? _mm512_loadu_si512(from + stride) : __m512i{};
    _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(to + RowTileBuffers::kValueStride, _mm512_unpackhi_epi16(a, b));
  }
}

// transposed[0 .. 64) = the scores of the groups [i, i + 4). While the tiles multiply, the groups' values are put in
// pairs and the next chunk is fetched. Tiles 0-3: sums, 4-5: keys, 6: queries.
LLMOPT_INLINE void score_groups(const Task& task, const RowTileBuffers& buffers, const RowTileChunk& chunk,
                                const RowTileChunk& next, int i) {
  const int64_t stride = task.head_dim * 2;
  const uint16_t* const* keys = chunk.keys + i;
  auto meanwhile = [&](int group, int column) {
    if (column == 0) next.prefetch(task, group);
    interleave_values(task, buffers, chunk, group, column);
  };
  asm volatile("" : : : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  int d = 0;
  for (; d < task.head_dim; d += 32) {
    _tile_loadd(6, buffers.query + d / 2 * kTileRows, 64);
    _tile_loadd(4, keys[0] + d, stride);
    _tile_dpbf16ps(0, 4, 6);
    meanwhile(i, d);
    _tile_loadd(5, keys[1] + d, stride);
    _tile_dpbf16ps(1, 5, 6);
    meanwhile(i + 1, d);
    _tile_loadd(4, keys[2] + d, stride);
    _tile_dpbf16ps(2, 4, 6);
    meanwhile(i + 2, d);
    _tile_loadd(5, keys[3] + d, stride);
    _tile_dpbf16ps(3, 5, 6);
    meanwhile(i + 3, d);
  }
  _tile_stored(0, buffers.transposed, 64);
  _tile_stored(1, buffers.transposed + 256, 64);
  _tile_stored(2, buffers.transposed + 512, 64);
  _tile_stored(3, buffers.transposed + 768, 64);
  asm volatile("" : : : "memory");
  for (; d < task.head_dim_v; d += 32) {
    for (int group = i; group < i + 4; ++group) meanwhile(group, d);
  }
}

// scores[r][j .. j + 64) for each row.
LLMOPT_INLINE void transpose_scores(const RowTileBuffers& buffers, int num_rows, int j) {
  for (int i = 0; i < 64; i += 16) {
    const float* from = buffers.transposed + i * kTileRows;
    float* to = buffers.scores + j + i;
    if (num_rows <= 4) {
      // Four rows of 16 keys: keys k, k + 4, k + 8, k + 12 share a vector, one per quarter.
      __m512 v[4];
      for (int k = 0; k < 4; ++k) {
        __m512 x = _mm512_castps128_ps512(_mm_load_ps(from + k * kTileRows));
        x = _mm512_mask_broadcast_f32x4(x, 0x00f0, _mm_load_ps(from + (k + 4) * kTileRows));
        x = _mm512_mask_broadcast_f32x4(x, 0x0f00, _mm_load_ps(from + (k + 8) * kTileRows));
        v[k] = _mm512_mask_broadcast_f32x4(x, 0xf000, _mm_load_ps(from + (k + 12) * kTileRows));
      }
      const __m512 a = _mm512_unpacklo_ps(v[0], v[1]), b = _mm512_unpackhi_ps(v[0], v[1]);
      const __m512 c = _mm512_unpacklo_ps(v[2], v[3]), d = _mm512_unpackhi_ps(v[2], v[3]);
      constexpr int kStride = RowTileBuffers::kScoreStride;
      _mm512_storeu_ps(to, _mm512_shuffle_ps(a, c, 0x44));
      _mm512_storeu_ps(to + kStride, _mm512_shuffle_ps(a, c, 0xee));
      _mm512_storeu_ps(to + 2 * kStride, _mm512_shuffle_ps(b, d, 0x44));
      _mm512_storeu_ps(to + 3 * kStride, _mm512_shuffle_ps(b, d, 0xee));
    } else {
      WordVec v[kLanes];
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; ++k) v[k] = load_as<WordVec>(from + k * kTileRows);
      transpose(v);
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) store(reinterpret_cast<uint32_t*>(to + r * RowTileBuffers::kScoreStride), v[r]);
    }
  }
}

// Columns [column, column + 16 * kTiles). Tiles 0-3: sums, 4-5: values, 6: probabilities.
template <int kTiles>
LLMOPT_INLINE void add_values(const Task& task, const RowTileBuffers& buffers, int num_keys, int column) {
  constexpr int kStride = RowTileBuffers::kValueStride;
  float* acc = task.accumulator + column;
  const int64_t acc_bytes = task.accumulator_stride * 4;
  const uint32_t* values = buffers.values + column / 16 * kStride;
  asm volatile("" : : : "memory");
  _tile_loadd(0, acc, acc_bytes);
  _tile_loadd(1, acc + 16, acc_bytes);
  if constexpr (kTiles == 4) {
    _tile_loadd(2, acc + 32, acc_bytes);
    _tile_loadd(3, acc + 48, acc_bytes);
  }
  for (int j = 0; j < num_keys; j += 32, values += 256) {
    _tile_loadd(6, buffers.probs + j, RowTileBuffers::kProbStride * 2);
    _tile_loadd(4, values, 64);
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(5, values + kStride, 64);
    _tile_dpbf16ps(1, 6, 5);
    if constexpr (kTiles == 4) {
      _tile_loadd(4, values + 2 * kStride, 64);
      _tile_dpbf16ps(2, 6, 4);
      _tile_loadd(5, values + 3 * kStride, 64);
      _tile_dpbf16ps(3, 6, 5);
    }
  }
  _tile_stored(0, acc, acc_bytes);
  _tile_stored(1, acc + 16, acc_bytes);
  if constexpr (kTiles == 4) {
    _tile_stored(2, acc + 32, acc_bytes);
    _tile_stored(3, acc + 48, acc_bytes);
  }
  asm volatile("" : : : "memory");
}

// From the order of the unpacked halves to that of the columns.
inline void finish_columns(const Task& task, int num_rows) {
  // Column 8 q + m of 32 is number 4 q + m of the first 16 for m < 4, else number 4 q + m - 4 of the second.
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int r = 0; r < num_rows; ++r) {
    for (int c = 0; c < task.head_dim_v; c += 32) {
      float* at = task.accumulator + r * task.accumulator_stride + c;
      const __m512 a = _mm512_loadu_ps(at), b = _mm512_loadu_ps(at + 16);
      _mm512_storeu_ps(at, _mm512_permutex2var_ps(a, low, b));
      _mm512_storeu_ps(at + 16, _mm512_permutex2var_ps(a, high, b));
    }
  }
}

// head_dim and head_dim_v are multiples of 32, block_size is one of 16, rows are at most 16.
inline void attend_row_tiles(const Task& task) {
  const int num_rows = task.num_q * task.group;
  RowTileBuffers buffers;
  buffers.place(task.workspace, task.head_dim, task.head_dim_v);
  std::memset(buffers.query, 0, task.head_dim / 2 * kTileRows * sizeof(uint32_t));
  std::memset(buffers.probs, 0, kTileRows * RowTileBuffers::kProbStride * sizeof(uint16_t));
  for (int r = 0; r < num_rows; ++r) {
    const auto* row = static_cast<const char*>(task.query) +
                      ((r / task.group) * task.query_token_stride + (r % task.group) * task.query_head_stride) * 2;
    for (int d = 0; d < task.head_dim / 2; ++d) std::memcpy(buffers.query + d * kTileRows + r, row + 4 * d, 4);
  }
  start_rows(task, num_rows);
  // The tiles have 16 rows; the others gather zeros.
  for (int r = num_rows; r < kTileRows; ++r) {
    std::memset(task.accumulator + r * task.accumulator_stride, 0, task.head_dim_v * sizeof(float));
  }

  const SoftmaxScale scale(task);
  // 16 keys from a multiple of 16 on lie in one block.
  int first = task.key_begin / 16 * 16;
  RowTileChunk chunks[2];
  RowTileChunk *chunk = &chunks[0], *next = &chunks[1];
  next->locate(task, first, task.key_begin, task.key_end);
  for (; first < task.key_end; first += kRowTileKeys) {
    std::swap(chunk, next);
    if (first + kRowTileKeys < task.key_end) {
      next->locate(task, first + kRowTileKeys, task.key_begin, task.key_end);
    } else {
      next->end = 0;
    }
    for (int j = 0; j < chunk->end; j += 64) {
      score_groups(task, buffers, *chunk, *next, j / 16);
      transpose_scores(buffers, num_rows, j);
    }
    const int high = static_cast<int>(round_up(chunk->end, 32));
    for (int r = 0; r < num_rows; ++r) {
      Interval seen = visible_keys(task, r, first, chunk->end);
      seen.begin = min(max(seen.begin, chunk->begin), seen.end);
      softmax_row<false>(task, scale, r, seen, buffers.scores + r * RowTileBuffers::kScoreStride,
                         buffers.probs + r * RowTileBuffers::kProbStride, 0, high);
    }
    int column = 0;
    for (; column + 64 <= task.head_dim_v; column += 64) add_values<4>(task, buffers, chunk->end, column);
    if (column < task.head_dim_v) add_values<2>(task, buffers, chunk->end, column);
  }
  finish_columns(task, num_rows);
}

}  // namespace
}  // namespace llmopt::attention
