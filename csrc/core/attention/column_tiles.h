// Many query rows in AMX tiles, keys read in place: flash attention with everything transposed, so that the softmax of
// a row runs along vectors, never across one.
//
//   for each span of keys
//     pack V into values^T                   [column][keys], the tile on the left of the second product
//     for each group of 32 rows
//       for each chunk of keys
//         scores^T[key][row] = K Q^T         K on the left as it lies in the cache, queries packed once
//         p = exp2(scores - reference)       vectors of 16 rows; pairs of keys are rounded to bfloat16 side by side,
//                                            which is the form of the tile on the right
//         acc^T[column][row] += V^T p
//
// Vector units and tiles work at the same time: between the exponentials of a chunk stand the tile instructions of its
// neighbours, the scores of the next chunk and the values of the one before (tile_work.h). For few rows the keys and
// values that come next are fetched to the second-level cache at an even pace (LineStream); many keep the units busy
// anyway.
//
// The reference of a row is a maximum that it has seen. It follows the running maximum only when that has grown by more
// than kLag: a probability of 2^kLag is as precise as one of 1, and most rescaling falls away.
#pragma once

#include "core/attention/kernels.h"
#include "core/attention/line_stream.h"
#include "core/attention/softmax.h"
#include "core/attention/storage.h"
#include "core/attention/tile_work.h"

namespace llmopt::attention {
namespace {

// Many rows load their queries and accumulators seldom; a few wait for the memory, which shorter spans than kSpanKeys
// let fetch ahead.
constexpr int kShortSpanKeys = kStreamKeys;
constexpr int kFewRows = 256;
// Short chunks stay in the first-level cache, long ones (kChunkKeys) load and store wide accumulators less often.
constexpr int kShortChunkKeys = 64;
constexpr int kGroupRows = 32;
constexpr float kLag = 8;

// The workspace of a task.
struct ColumnTileBuffers {
  uint32_t* query;      // [rows / 16, head_dim / 2 pairs of numbers, 16 rows]
  float* scores[2];     // [2, kChunkKeys, 16 rows] of two chunks
  uint32_t* probs[2];   // [2, kChunkKeys / 2 pairs of keys, 16 rows]
  uint32_t* values;     // [kSpanKeys / 32, head_dim_v / 16, 16 columns, 16 pairs of keys]
  float* accumulators;  // [rows / 16, head_dim_v, 16 rows]
  int* positions;       // [rows] keys of the tokens
  int* starts;          // [rows] first key inside of the window, where drafts are trees
  int* masks[2];        // [2, rows] the lower and the upper bits of the drafts that a row sees, where drafts are trees

  // With base == nullptr only the size is of use.
  size_t place(std::byte* base, int rows, int head_dim, int head_dim_v) {
    size_t size = 0;
    auto take = [&]<class T>(T*& pointer, int64_t count) {
      pointer = reinterpret_cast<T*>(base + size);
      size += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    };
    const int64_t padded_rows = round_up(rows, kGroupRows);
    take(query, padded_rows * head_dim / 2);
    for (float*& of_chunk : scores) take(of_chunk, kChunkKeys * kGroupRows);
    for (uint32_t*& of_chunk : probs) take(of_chunk, kChunkKeys / 2 * kGroupRows);
    take(values, kSpanKeys / 2 * head_dim_v);
    take(accumulators, padded_rows * head_dim_v);
    take(positions, padded_rows);
    take(starts, padded_rows);
    for (int*& half : masks) take(half, padded_rows);
    return size;
  }
};

inline size_t column_tile_workspace_bytes(int rows, int head_dim, int head_dim_v) {
  return ColumnTileBuffers().place(nullptr, rows, head_dim, head_dim_v);
}

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
inline void pack_value_columns(const Task& task, const KeySpan& chunk, uint32_t* values) {
  constexpr int kTile = 16 * kLanes;
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
      uint32_t* to = values + (j / 32 * (task.head_dim_v / 16) + c / 16) * kTile;
      // Number 4 q + m of the low halves is column 8 q + m, that of the high halves is column 8 q + 4 + m.
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const int column = i / 4 * 8 + i % 4;
        store(to + column * kLanes, low[i]);
        store(to + (column + 4) * kLanes, high[i]);
      }
    }
  }
}

// What a row at a position sees of a span that starts with key `first`.
LLMOPT_INLINE int visible_end(const KeySpan& span, int first, int position) {
  return max(0, min(span.end, position + 1 - first));
}
LLMOPT_INLINE int visible_begin(const Task& task, const KeySpan& span, int first, int position) {
  return task.sliding_window == 0 ? span.begin : max(span.begin, position + 1 - first - task.sliding_window);
}

// Fills starts and masks.
inline void locate_drafts(const Task& task, int num_rows, int padded_rows, const ColumnTileBuffers& buffers) {
  for (int r = 0; r < padded_rows; ++r) {
    const uint64_t mask = r < num_rows ? draft_mask(task, r) : 0;
    const int position = mask ? task.first_draft - 1 + std::popcount(mask) : buffers.positions[r];
    const uint64_t seen = inside_window(task, mask);
    buffers.starts[r] = task.sliding_window > 0 ? max(0, position + 1 - task.sliding_window) : 0;
    buffers.masks[0][r] = static_cast<int>(seen & 0xffffffff);
    buffers.masks[1][r] = static_cast<int>(seen >> 32);
  }
}

// What 16 rows see of a span that starts with key `first`, one row per lane.
struct RowIntervals {
  IntVec begin, end;
  int whole_begin, whole_end;  // every row sees these
  const int* masks[2] = {};    // of these rows, where drafts are trees
  int first_draft = 0;         // in the span, with masks

  RowIntervals(const Task& task, const KeySpan& span, int first, int row, const ColumnTileBuffers& buffers) {
    const int* positions = buffers.positions + row;
    // Ends below zero need no care: they hide all.
    const IntVec next = load_as<IntVec>(positions) + (1 - first);
    end = next < span.end ? next : IntVec{} + span.end;
    begin = IntVec{} + span.begin;
    whole_end = visible_end(span, first, positions[0]);
    if (task.draft_masks) {
      const IntVec start = load_as<IntVec>(buffers.starts + row) - first;
      begin = start > begin ? start : begin;
      whole_begin = _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(begin));
      masks[0] = buffers.masks[0] + row;
      masks[1] = buffers.masks[1] + row;
      first_draft = task.first_draft - first;
      whole_end = max(0, min(whole_end, first_draft));
      return;
    }
    whole_begin = visible_begin(task, span, first, positions[kLanes - 1]);
    const IntVec none_before = next - task.sliding_window;
    if (task.sliding_window > 0) begin = none_before > begin ? none_before : begin;
  }

  LLMOPT_INLINE IntVec see(int key) const {
    const IntVec seen = (begin <= key) & (end > key);
    const int draft = key - first_draft;
    if (!masks[0] || draft < 0) return seen;
    if (draft >= 64) return IntVec{};
    const IntVec bits = load_as<IntVec>(masks[draft / 32]) >> (draft % 32) & 1;
    return seen & (bits != 0);
  }
};

// Scores of 16 rows in [low, high) become probabilities; the rows' references, sums and accumulators follow.
LLMOPT_INLINE void softmax_columns(const Task& task, const SoftmaxScale& scale, const RowIntervals& seen, int row,
                                   float* scores, uint32_t* probs, float* acc, int low, int high, TileWork& work,
                                   int steps_per_16_keys, LineStream& stream) {
  if (scale.capped) {
    for (int j = low; j < high; ++j) {
      float* at = scores + (j - low) * kLanes;
      store(at, tanh(load_as<Vec>(at) * scale.cap_in) * scale.cap_out);
    }
  }
  auto hide = [&](int j) {
    const Vec score = load_as<Vec>(scores + (j - low) * kLanes);
    store(scores + (j - low) * kLanes, select(seen.see(j), score, splat(kNegativeInfinity)));
  };
  for (int j = low; j < min(high, seen.whole_begin); ++j) hide(j);
  for (int j = max(low, seen.whole_end); j < high; ++j) hide(j);

  Vec best[4] = {splat(kNegativeInfinity), splat(kNegativeInfinity), splat(kNegativeInfinity),
                 splat(kNegativeInfinity)};
  for (int j = low; j < high; j += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) best[i] = larger(load_as<Vec>(scores + (j - low + i) * kLanes), best[i]);
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
  auto exponentials = [&](int j) {
    const float* from = scores + (j - low) * kLanes;
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
          probs + ((j - low) / 2 + i) * kLanes,
          _mm512_mask_blend_epi16(0xaaaaaaaa, reinterpret_cast<__m512i>(even >> 16), reinterpret_cast<__m512i>(odd)));
    }
  };
  for (int j = low; j < high; j += 16) {
    stream.fetch();
    for (int i = 0; i < steps_per_16_keys; ++i) work.advance();
    for (int i = 0; i < 16; i += 4) exponentials(j + i);
  }
  const Vec total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  const Vec old_sum = load_as<Vec>(task.row_sum + row);
  if (moves) {
    work.finish();  // acc is complete up to the chunk before
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
  int* const positions = buffers.positions;
  for (int r = 0, position = task.first_position; r < padded_rows; ++position) {
    for (int g = 0; g < task.group && r < padded_rows; ++g) positions[r++] = position;
  }
  if (task.draft_masks) locate_drafts(task, num_rows, padded_rows, buffers);

  SoftmaxScale scale(task);
  if (scale.factor == 0) {
    // Hidden scores are -infinity, which a factor of zero would turn into NaN.
    std::memset(buffers.query, 0, padded_rows * task.head_dim * sizeof(uint16_t));
    scale.factor = 1;
  }
  const int chunk_keys = task.head_dim_v <= 64 ? kShortChunkKeys : kChunkKeys;
  const int span_keys = num_rows <= kFewRows ? kShortSpanKeys : kSpanKeys;
  KeySpan span;
  // 16 keys from a multiple of 16 on lie in one block.
  for (int first = task.key_begin / 16 * 16; first < task.key_end; first += span_keys) {
    span.locate(task, first, task.key_begin, min(task.key_end, first + span_keys));
    span.unpack(task);
    LineStream stream;
    if (num_rows <= kFewRows) stream.add_following(task, first + span_keys);
    stream.pace((span.end + 15) / 16 * ((num_rows + kLanes - 1) / kLanes));
    pack_value_columns(task, span, buffers.values);

    // Chunk [low, high) of the group of rows from `row` on. Rows are in the order of their positions: the first sees
    // the earliest key, the last the latest.
    struct Chunk {
      int row, low, high;
    };
    auto first_visible = [&](int row) {
      if (!task.draft_masks) return visible_begin(task, span, first, positions[row]);
      int start = buffers.starts[row];  // drafts need not be in the order of their positions
      for (int i = row + 1; i < row + kGroupRows; ++i) start = min(start, buffers.starts[i]);
      return max(span.begin, start - first);
    };
    auto find = [&](int row, int low) {
      for (; row < padded_rows; row += kGroupRows, low = 0) {
        low = max(low, first_visible(row) / kStepKeys * kStepKeys);
        const int end =
            static_cast<int>(round_up(visible_end(span, first, positions[row + kGroupRows - 1]), kStepKeys));
        if (low < end) return Chunk{row, low, min(low + chunk_keys, end)};
      }
      return Chunk{padded_rows, 0, 0};
    };
    auto is_half = [&](const Chunk& chunk) { return chunk.row + kLanes >= num_rows; };
    TileWork work(task, span, buffers.values);
    auto score = [&](const Chunk& chunk, int buffer) {
      if (chunk.row == padded_rows) return;
      work.add_scores(buffers.query + chunk.row * (task.head_dim / 2), is_half(chunk), chunk.low, chunk.high,
                      buffers.scores[buffer]);
    };
    Chunk chunk = find(0, 0);
    score(chunk, 0);
    work.finish();
    for (int buffer = 0; chunk.row < padded_rows; buffer ^= 1) {
      const Chunk next = find(chunk.row, chunk.high);
      score(next, buffer ^ 1);
      const int halves = is_half(chunk) ? 1 : 2;
      const int slots = (chunk.high - chunk.low) / 16 * halves, steps = (work.size() + slots - 1) / slots;
      float* acc = buffers.accumulators + chunk.row * task.head_dim_v;
      for (int half = 0; half < halves; ++half) {
        const int row = chunk.row + half * kLanes;
        softmax_columns(task, scale, RowIntervals(task, span, first, row, buffers), row,
                        buffers.scores[buffer] + half * kChunkKeys * kLanes,
                        buffers.probs[buffer] + half * kChunkKeys / 2 * kLanes, acc + half * task.head_dim_v * kLanes,
                        chunk.low, chunk.high, work, steps, stream);
      }
      work.finish();
      work.add_values(buffers.probs[buffer], is_half(chunk), chunk.low, chunk.high, acc);
      chunk = next;
    }
    work.finish();
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
