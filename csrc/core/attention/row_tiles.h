// Up to 16 query rows in AMX tiles, keys and values read in place and once (decoding, verification of drafts). Bound by
// the memory that keys and values come from: 16 rows take as long as one.
//
//   for each chunk of keys
//     scores^T[key][row] = K Q^T    the tile on the left is 16 keys x 32 numbers, as they lie in the cache; queries are
//                                   packed once, in pairs of numbers
//     p = exp2(scores - maximum)    row by row, rounded to bfloat16
//     acc[row][column] += P V       the tile on the right wants pairs of keys: two rows of V are interleaved by an
//                                   unpack of each half. That leaves the columns of 32 in another order, in which they
//                                   are accumulated; finish_columns() puts them right
//
// Each of the three runs over the whole chunk, so that little waits for what came just before. All the while the next
// chunk, which may be that of the next task, is fetched to the second-level cache at an even pace.
#pragma once

#include <optional>

#include "core/attention/kernels.h"
#include "core/attention/line_stream.h"
#include "core/attention/softmax.h"
#include "core/attention/storage.h"

namespace llmopt::attention {
namespace {

constexpr int kTileRows = kMaxTileRows;
constexpr int kRowTileKeys = kStreamKeys;  // keys of a chunk

using RowTileChunk = StreamChunk;

// The workspace of a task.
struct RowTileBuffers {
  static constexpr int kScoreStride = kRowTileKeys + kLanes;
  static constexpr int kProbStride = kRowTileKeys + 2 * kLanes;

  uint32_t* query;    // [head_dim / 32, 16 pairs of numbers, 16 rows]; see also IntegerQueries
  float* transposed;  // [2, 32 keys, 16 rows]
  float* scores;      // [16, kScoreStride]
  uint16_t* keys;     // [2, 32 keys, head_dim], where the cache is quantized
  uint16_t* probs;    // [16, kProbStride]; rows that are not there hold anything
  uint32_t* values;   // [2, 4, 16 pairs of keys, 16 columns]

  // With base == nullptr only the size is of use.
  size_t place(std::byte* base, int head_dim) {
    size_t size = 0;
    auto take = [&]<class T>(T*& pointer, int64_t count) {
      pointer = reinterpret_cast<T*>(base + size);
      size += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    };
    take(query, head_dim / 2 * kTileRows);
    take(transposed, 2 * 32 * kTileRows);
    take(scores, kTileRows * kScoreStride);
    take(keys, 2 * 32 * head_dim);
    take(probs, kTileRows * kProbStride);
    take(values, 2 * 4 * 256);
    return size;
  }
};

inline size_t row_tile_workspace_bytes(int head_dim) { return RowTileBuffers().place(nullptr, head_dim); }

// query^T in pairs of numbers; rows that are not there are zeros.
inline void pack_query_rows(const Task& task, int num_rows, uint32_t* to) {
  auto row = [&](int r, int d) {
    return load_as<WordVec>(static_cast<const uint16_t*>(task.query) + (r / task.group) * task.query_token_stride +
                            (r % task.group) * task.query_head_stride + d);
  };
  for (int d = 0; d < task.head_dim; d += 32, to += 16 * kTileRows) {
    WordVec v[kLanes];
    for (int r = 0; r < kLanes; ++r) v[r] = r < num_rows ? row(r, d) : WordVec{};
    transpose(v);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(to + i * kTileRows, v[i]);
  }
}

// out[32 keys][16 rows] = scores^T of two groups of keys. Tiles 0-1: sums, 2-3: keys, 4-7: queries, which stay
// there when kDepth, the number of tiles of a query, is not zero.
template <int kDepth>
LLMOPT_INLINE void score_groups(const Task& task, const uint32_t* query, const uint16_t* keys, const uint16_t* keys2,
                                LineStream& stream, float* out) {
  const int64_t stride = task.head_dim * 2;
  asm volatile("" : : : "memory");
  _tile_zero(0);
  _tile_zero(1);
#define LLMOPT_SCORE_STEP(query_tile, d) \
  _tile_loadd(2, keys + (d), stride);    \
  _tile_dpbf16ps(0, 2, query_tile);      \
  _tile_loadd(3, keys2 + (d), stride);   \
  _tile_dpbf16ps(1, 3, query_tile)
  if constexpr (kDepth == 2 || kDepth == 4) {
    LLMOPT_SCORE_STEP(4, 0);
    stream.fetch();
    LLMOPT_SCORE_STEP(5, 32);
    if constexpr (kDepth == 4) {
      LLMOPT_SCORE_STEP(6, 64);
      LLMOPT_SCORE_STEP(7, 96);
    }
  } else {
    for (int d = 0; d < task.head_dim; d += 32) {
      _tile_loadd(4, query + d / 2 * kTileRows, 64);
      LLMOPT_SCORE_STEP(4, d);
    }
    stream.fetch();
  }
#undef LLMOPT_SCORE_STEP
  _tile_stored(0, out, 64);
  _tile_stored(1, out + 256, 64);
  asm volatile("" : : : "memory");
}

// scores[r][0 .. 32) of each row from from[32 keys][16 rows].
LLMOPT_INLINE void transpose_scores(const float* from, int num_rows, float* scores) {
  constexpr int kStride = RowTileBuffers::kScoreStride;
  for (int i = 0; i < 32; i += 16, from += 16 * kTileRows) {
    float* to = scores + i;
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
      for (int r = 0; r < kLanes; ++r) store(reinterpret_cast<uint32_t*>(to + r * kStride), v[r]);
    }
  }
}

// The quantized keys of a group as elements.
LLMOPT_INLINE void unpack_keys(const Task& task, const uint16_t* group, uint16_t* to) {
  const auto* row = reinterpret_cast<const int8_t*>(group);
  for (int j = 0; j < 16; ++j, row += task.key_row_bytes, to += task.head_dim) {
    dequantize_row<BFloat16>(row, task.head_dim, to);
  }
}

template <int kDepth, bool kQuantized>
LLMOPT_INLINE void score_chunk(const Task& task, const RowTileBuffers& buffers, const RowTileChunk& chunk,
                               LineStream& stream, int num_rows) {
  if constexpr (kDepth > 0) {
    _tile_loadd(4, buffers.query, 64);
    _tile_loadd(5, buffers.query + 256, 64);
    if constexpr (kDepth == 4) {
      _tile_loadd(6, buffers.query + 512, 64);
      _tile_loadd(7, buffers.query + 768, 64);
    }
  }
  // Sums are transposed a step later: they cannot be loaded at once.
  constexpr int kSize = 32 * kTileRows;
  // Quantized keys are unpacked a step ahead, as their tiles cannot be loaded at once either.
  const auto unpacked = [&](int i) { return buffers.keys + i % 4 * 16 * task.head_dim; };
  const auto unpack = [&](int i) {
    for (int k = i; k < i + 2; ++k) unpack_keys(task, chunk.keys[k], unpacked(k));
  };
  if constexpr (kQuantized) unpack(0);
  int i = 0;
  for (; i * 16 < chunk.end; i += 2) {
    if constexpr (kQuantized) {
      if ((i + 2) * 16 < chunk.end) unpack(i + 2);
    }
    score_groups<kDepth>(task, buffers.query, kQuantized ? unpacked(i) : chunk.keys[i],
                         kQuantized ? unpacked(i + 1) : chunk.keys[i + 1], stream,
                         buffers.transposed + i / 2 % 2 * kSize);
    stream.fetch();
    if (i > 0) transpose_scores(buffers.transposed + (i / 2 - 1) % 2 * kSize, num_rows, buffers.scores + (i - 2) * 16);
  }
  transpose_scores(buffers.transposed + (i / 2 - 1) % 2 * kSize, num_rows, buffers.scores + (i - 2) * 16);
}

// Quantized keys are tiles of int8 as they lie in the cache. Up to kIntegerRows queries meet them so, with the query in
// 15 bits, cut into two planes of int8: q = scale * (128 * high + low). That rounds less than bfloat16 does.
constexpr int kIntegerRows = 8;

struct IntegerQueries {
  int8_t* tiles;  // [head_dim / 64, 16 quads of numbers, 16 columns, 4]; columns: high plane of 8 rows, low plane
  __m256 scale;

  static bool fit(const Task& task, int num_rows) { return num_rows <= kIntegerRows && task.head_dim % 64 == 0; }

  IntegerQueries(const Task& task, int num_rows, const RowTileBuffers& buffers)
      : tiles(reinterpret_cast<int8_t*>(buffers.query)) {
    std::memset(tiles, 0, task.head_dim * 16);
    alignas(32) float scales[kIntegerRows] = {};
    for (int r = 0; r < num_rows; ++r) {
      const uint16_t* row = static_cast<const uint16_t*>(task.query) + (r / task.group) * task.query_token_stride +
                            (r % task.group) * task.query_head_stride;
      __m512i largest{};  // magnitudes as bits, which are in their order; infinity and NaN last
      for (int d = 0; d < task.head_dim; d += kLanes) {
        largest = _mm512_max_epi32(largest, reinterpret_cast<__m512i>(words(BFloat16::load(row + d)) & 0x7fffffff));
      }
      const int bits = _mm512_reduce_max_epi32(largest);
      const float top = floats(WordVec{} + static_cast<uint32_t>(bits))[0];
      const bool is_finite = bits < 0x7f800000;
      scales[r] = is_finite ? top / 16319 : __builtin_nanf("");
      const float inverse = is_finite && top > 1e-30f ? 16319 / top : 0;
      for (int d = 0; d < task.head_dim; d += kLanes) {
        const __m512i q = _mm512_cvtps_epi32(BFloat16::load(row + d) * splat(inverse));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
        const __m512i low = _mm512_sub_epi32(q, _mm512_slli_epi32(high, 7));
        alignas(16) int32_t quads[2][4];
        _mm_store_si128(reinterpret_cast<__m128i*>(quads[0]), _mm512_cvtepi32_epi8(high));
        _mm_store_si128(reinterpret_cast<__m128i*>(quads[1]), _mm512_cvtepi32_epi8(low));
        for (int i = 0; i < 4; ++i) {
          std::memcpy(tiles + (d / 4 + i) * 64 + r * 4, &quads[0][i], 4);
          std::memcpy(tiles + (d / 4 + i) * 64 + (r + kIntegerRows) * 4, &quads[1][i], 4);
        }
      }
    }
    scale = _mm256_load_ps(scales);
  }
};

// out[16 keys][16 columns] = sums of the planes. Tiles 0-1: sums, 2-3: keys, 4: queries.
LLMOPT_INLINE void multiply_integers(const Task& task, const int8_t* queries, const RowTileChunk& chunk, int i,
                                     int32_t* out) {
  asm volatile("" : : : "memory");
  _tile_zero(0);
  _tile_zero(1);
  const auto *keys = reinterpret_cast<const int8_t*>(chunk.keys[i]),
             *keys2 = reinterpret_cast<const int8_t*>(chunk.keys[i + 1]);
  for (int d = 0; d < task.head_dim; d += 64) {
    _tile_loadd(4, queries + d * 16, 64);
    _tile_loadd(2, keys + d, task.key_row_bytes);
    _tile_dpbssd(0, 2, 4);
    _tile_loadd(3, keys2 + d, task.key_row_bytes);
    _tile_dpbssd(1, 3, 4);
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + 256, 64);
  asm volatile("" : : : "memory");
}

// The sums of the planes of groups i and i + 1 become scores, in the first 8 columns.
LLMOPT_INLINE void scale_integers(const Task& task, const IntegerQueries& queries, const RowTileChunk& chunk, int i,
                                  int32_t* sums) {
  for (int half = 0; half < 2; ++half) {
    const int8_t* scale = reinterpret_cast<const int8_t*>(chunk.keys[i + half]) + task.head_dim;
    for (int j = 0; j < 16; ++j, scale += task.key_row_bytes, sums += 16) {
      uint16_t bits;
      std::memcpy(&bits, scale, sizeof(bits));
      const __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(sums));
      const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(sums + 8));
      const __m256 sum = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(high, 7), low));
      const __m256 factor = _mm256_mul_ps(queries.scale, _mm256_set1_ps(BFloat16::to_float(bits)));
      _mm256_store_ps(reinterpret_cast<float*>(sums), _mm256_mul_ps(sum, factor));
    }
  }
}

LLMOPT_INLINE void score_integer_chunk(const Task& task, const IntegerQueries& queries, const RowTileBuffers& buffers,
                                       const RowTileChunk& chunk, LineStream& stream, int num_rows) {
  constexpr int kSize = 32 * kTileRows;
  const auto finish = [&](int i) {
    float* scores = buffers.transposed + i / 2 % 2 * kSize;
    scale_integers(task, queries, chunk, i, reinterpret_cast<int32_t*>(scores));
    transpose_scores(scores, num_rows, buffers.scores + i * 16);
  };
  int i = 0;
  for (; i * 16 < chunk.end; i += 2) {
    multiply_integers(task, queries.tiles, chunk, i,
                      reinterpret_cast<int32_t*>(buffers.transposed + i / 2 % 2 * kSize));
    stream.fetch();
    stream.fetch();
    if (i > 0) finish(i - 2);
  }
  finish(i - 2);
}

// Columns [column, column + 16 * kTiles) of the 32 keys of groups i and i + 1, in pairs of keys. Rows outside of the
// chunk's range become zeros.
template <int kTiles, bool kQuantized>
LLMOPT_INLINE void interleave_values(const Task& task, const RowTileChunk& chunk, LineStream& stream, int i, int column,
                                     bool fetches, uint32_t* to) {
  for (int half = 0; half < 2; ++half, ++i, to += 128) {
    if (fetches) stream.fetch();
    const auto* from = reinterpret_cast<const std::byte*>(chunk.values[i]);
    const auto load = [&](int j, int c) {
      const std::byte* row = from + static_cast<int64_t>(j) * task.value_row_bytes;
      if constexpr (kQuantized) {
        const auto* values = reinterpret_cast<const int8_t*>(row);
        return dequantize_32(values + column + c, scale_behind(values + task.head_dim_v));
      } else {
        return _mm512_loadu_si512(row + 2 * (column + c));
      }
    };
    const int begin = chunk.begin - i * 16, end = chunk.end - i * 16;
    auto put = [&](int j, int c, __m512i a, __m512i b) {
      _mm512_store_si512(to + c * 16 + j * 8, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(to + c * 16 + 256 + j * 8, _mm512_unpackhi_epi16(a, b));
    };
    if (begin <= 0 && end >= 16) {
#pragma GCC unroll 8
      for (int j = 0; j < 16; j += 2) {
        for (int c = 0; c < 16 * kTiles; c += 32) {
          put(j, c, load(j, c), load(j + 1, c));
        }
      }
      continue;
    }
    for (int j = 0; j < 16; j += 2) {
      for (int c = 0; c < 16 * kTiles; c += 32) {
        put(j, c, j >= begin && j < end ? load(j, c) : __m512i{},
            j + 1 >= begin && j + 1 < end ? load(j + 1, c) : __m512i{});
      }
    }
  }
}

// Columns [column, column + 16 * kTiles). Tiles 0-3: sums, 4-5: values, 6: probabilities.
template <int kTiles, bool kQuantized>
LLMOPT_INLINE void add_values(const Task& task, const RowTileBuffers& buffers, const RowTileChunk& chunk,
                              LineStream& stream, int column) {
  float* acc = task.accumulator + column;
  const int64_t acc_bytes = task.accumulator_stride * 4;
  const bool fetches = column == 0;
  interleave_values<kTiles, kQuantized>(task, chunk, stream, 0, column, fetches, buffers.values);
  asm volatile("" : : : "memory");
  _tile_loadd(0, acc, acc_bytes);
  _tile_loadd(1, acc + 16, acc_bytes);
  if constexpr (kTiles == 4) {
    _tile_loadd(2, acc + 32, acc_bytes);
    _tile_loadd(3, acc + 48, acc_bytes);
  }
  for (int i = 0; i * 16 < chunk.end; i += 2) {
    // The values of the next step are put in pairs while the tiles of this one multiply.
    const uint32_t* values = buffers.values + i / 2 % 2 * 1024;
    if ((i + 2) * 16 < chunk.end) {
      interleave_values<kTiles, kQuantized>(task, chunk, stream, i + 2, column, fetches,
                                            buffers.values + (i / 2 + 1) % 2 * 1024);
    }
    asm volatile("" : : : "memory");
    _tile_loadd(6, buffers.probs + i * 16, RowTileBuffers::kProbStride * 2);
    _tile_loadd(4, values, 64);
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(5, values + 256, 64);
    _tile_dpbf16ps(1, 6, 5);
    if constexpr (kTiles == 4) {
      _tile_loadd(4, values + 512, 64);
      _tile_dpbf16ps(2, 6, 4);
      _tile_loadd(5, values + 768, 64);
      _tile_dpbf16ps(3, 6, 5);
    }
    asm volatile("" : : : "memory");
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
template <bool kQuantized>
void attend_row_tiles(const Task& task) {
  const int num_rows = task.num_q * task.group;
  RowTileBuffers buffers;
  buffers.place(task.workspace, task.head_dim);
  const bool has_integers = kQuantized && IntegerQueries::fit(task, num_rows);
  std::optional<IntegerQueries> integers;
  if (has_integers) {
    integers.emplace(task, num_rows, buffers);
  } else {
    pack_query_rows(task, num_rows, buffers.query);
  }
  start_rows(task, num_rows);

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
    } else if (task.next) {
      next->locate(*task.next, task.next->key_begin / 16 * 16, task.next->key_begin, task.next->key_end);
    } else {
      next->end = 0;
    }
    LineStream stream;
    stream.add(*next, task);
    stream.pace((chunk->end + 15) / 16 * 2 + num_rows);
    if (has_integers) {
      score_integer_chunk(task, *integers, buffers, *chunk, stream, num_rows);
    } else if (task.head_dim == 64) {
      score_chunk<2, kQuantized>(task, buffers, *chunk, stream, num_rows);
    } else if (task.head_dim == 128) {
      score_chunk<4, kQuantized>(task, buffers, *chunk, stream, num_rows);
    } else {
      score_chunk<0, kQuantized>(task, buffers, *chunk, stream, num_rows);
    }
    const int high = static_cast<int>(round_up(chunk->end, 32));
    for (int r = 0; r < num_rows; ++r) {
      stream.fetch();
      const Interval seen = visible_keys(task, r, first, chunk->begin, chunk->end);
      softmax_row<false>(task, scale, r, first, seen, buffers.scores + r * RowTileBuffers::kScoreStride,
                         buffers.probs + r * RowTileBuffers::kProbStride, 0, high);
    }
    int column = 0;
    for (; column + 64 <= task.head_dim_v; column += 64)
      add_values<4, kQuantized>(task, buffers, *chunk, stream, column);
    if (column < task.head_dim_v) add_values<2, kQuantized>(task, buffers, *chunk, stream, column);
  }
  finish_columns(task, num_rows);
}

}  // namespace
}  // namespace llmopt::attention
