// A few query rows (decoding, verification of short drafts): bound by the memory that keys and values come from, so
// both are read in place and once, for all rows together.
//
// Keys are taken kSubTile at a time:
//   scores[r][j] = q[r] . k[j]        16 dot products side by side, then one tree of additions
//   p = exp2(scores - running max)    the accumulator is rescaled when the max moved
//   acc[r] += p[r][j] * v[j]          4 vectors of columns x 4 rows stay in registers
#pragma once

#include "core/attention/kernels.h"
#include "core/attention/quantized_rows.h"
#include "core/attention/softmax.h"
#include "core/attention/storage.h"

namespace llmopt::attention {
namespace {

constexpr int kSubTile = 128;
static_assert(kSubTile <= kMaxChunkKeys);

// Dot products of kRows rows with kLanes / kRows keys. Lane r * (kLanes / kRows) + j of the result is q[r] . k[j].
template <class Dot, int kRows>
LLMOPT_INLINE Vec dot_block(const typename Dot::Query* const* q, const typename Dot::Element* const* k, int head_dim) {
  constexpr int kKeys = kLanes / kRows;
  Vec acc[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) acc[i] = splat(0);
  int d = 0;
  for (; d + Dot::kStep <= head_dim; d += Dot::kStep) {
    typename Dot::Operand key[kKeys];
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) key[j] = Dot::load_key(k[j] + d);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto query = Dot::load_query(q[r] + d);
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) acc[r * kKeys + j] = Dot::multiply_add(query, key[j], acc[r * kKeys + j]);
    }
  }
  if (d < head_dim) {
    const int n = head_dim - d;
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) {
      const auto key = Dot::load_key_first(k[j] + d, n);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        acc[r * kKeys + j] = Dot::multiply_add(Dot::load_query(q[r] + d), key, acc[r * kKeys + j]);
      }
    }
  }
  return sum_each(acc);
}

// Blocks from this size on are left to the hardware, which fetches ahead within a page. Measured on keys out of memory,
// blocks of 16 keys, head_dim 64: bfloat16 (2 KiB) gains 40%, float32 (4 KiB) nothing.
constexpr int kPageBytes = 4096;

// Keys and values that come next.
template <class Element>
struct Upcoming {
  const Element* const* keys;
  const Element* const* values;
  int count;
  int key_row_bytes, value_row_bytes;

  LLMOPT_INLINE void prefetch(int begin, int end) const {
    const auto fetch = [](const Element* row, int row_bytes) {
      for (int i = 0; i < row_bytes; i += 64) __builtin_prefetch(reinterpret_cast<const std::byte*>(row) + i, 0, 2);
    };
    for (int j = begin; j < min(end, count); ++j) {
      fetch(keys[j], key_row_bytes);
      fetch(values[j], value_row_bytes);
    }
  }
};

template <class Dot, int kRows>
void score_rows(const typename Dot::Query* const* q, int num_rows, const typename Dot::Element* const* k, int num_keys,
                int head_dim, float* scores, const Upcoming<typename Dot::Element>& upcoming) {
  constexpr int kKeys = kLanes / kRows;
  for (int j = 0; j < num_keys; j += kKeys) {
    upcoming.prefetch(j, j + kKeys);
    // The pointers behind the last key repeat it; their scores are not used.
    float lanes[kLanes];
    store(lanes, dot_block<Dot, kRows>(q, k + j, head_dim));
    for (int r = 0; r < num_rows; ++r) std::memcpy(scores + r * kSubTile + j, lanes + r * kKeys, kKeys * sizeof(float));
  }
}

// acc[r][c .. c + kVecs * kLanes) += sum over keys of p[r][j] * v[j][c ..)
template <class Kv, int kRows, int kVecs>
LLMOPT_INLINE void accumulate_columns(const float* p, const typename Kv::Element* const* v, int begin, int end, int c,
                                      float* acc, int64_t stride) {
  Vec sum[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) sum[r][i] = load_as<Vec>(acc + r * stride + c + i * kLanes);
  }
  for (int j = begin; j < end; ++j) {
    Vec value[kVecs];
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) value[i] = Kv::load(v[j] + c + i * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = splat(p[r * kSubTile + j]);
#pragma GCC unroll 4
      for (int i = 0; i < kVecs; ++i) sum[r][i] += weight * value[i];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) store(acc + r * stride + c + i * kLanes, sum[r][i]);
  }
}

template <class Kv, int kRows>
void accumulate_rows(const float* p, const typename Kv::Element* const* v, int begin, int end, int head_dim_v,
                     float* acc, int64_t stride) {
  int c = 0;
  for (; c + 4 * kLanes <= head_dim_v; c += 4 * kLanes) {
    accumulate_columns<Kv, kRows, 4>(p, v, begin, end, c, acc, stride);
  }
  for (; c + kLanes <= head_dim_v; c += kLanes) accumulate_columns<Kv, kRows, 1>(p, v, begin, end, c, acc, stride);
  if (c == head_dim_v) return;
  for (int r = 0; r < kRows; ++r) {
    Vec sum = load_as<Vec>(acc + r * stride + c);
    for (int j = begin; j < end; ++j) sum += splat(p[r * kSubTile + j]) * Kv::load_first(v[j] + c, head_dim_v - c);
    store(acc + r * stride + c, sum);
  }
}

// The workspace holds, one after another: queries [kMaxRows][padded head_dim], pointers to the keys and values of a
// sub-tile, scores [kMaxRows][kSubTile].
inline size_t rows_workspace_bytes(int head_dim) {
  return kMaxRows * round_up(head_dim, 64) * sizeof(float) + 4 * (kSubTile + kLanes) * sizeof(void*) +
         kMaxRows * kSubTile * sizeof(float);
}

template <class Dot, class Kv>
void attend_rows(const Task& task) {
  using Query = typename Dot::Query;
  using Element = typename Kv::Element;
  const int num_rows = task.num_q * task.group;
  const int64_t query_stride = round_up(task.head_dim, 64);
  auto* query = reinterpret_cast<Query*>(task.workspace);
  auto* keys = reinterpret_cast<const Element**>(query + kMaxRows * query_stride);
  auto* values = keys + kSubTile + kLanes;
  auto* next_keys = values + kSubTile + kLanes;
  auto* next_values = next_keys + kSubTile + kLanes;
  auto* scores = reinterpret_cast<float*>(next_values + kSubTile + kLanes);

  const Query* q[kMaxRows + 4];
  for (int r = 0; r < num_rows; ++r) {
    Query* row = query + r * query_stride;
    const Element* from = static_cast<const Element*>(task.query) + (r / task.group) * task.query_token_stride +
                          (r % task.group) * task.query_head_stride;
    for (int d = 0; d < task.head_dim; ++d) row[d] = Dot::to_query(from[d]);
    for (int64_t d = task.head_dim; d < query_stride; ++d) row[d] = 0;
    q[r] = row;
  }
  // Three rows are computed as four, the last one twice.
  for (int r = num_rows; r < kMaxRows + 4; ++r) q[r] = q[num_rows - 1];
  start_rows(task, num_rows);

  const SoftmaxScale scale(task);
  const bool small_blocks = task.block_size * task.key_row_bytes < kPageBytes;
  locate<Element>(task, task.key_begin, min(kSubTile, task.key_end - task.key_begin), next_keys, next_values);
  for (int begin = task.key_begin; begin < task.key_end; begin += kSubTile) {
    const int num_keys = min(kSubTile, task.key_end - begin);
    std::swap(keys, next_keys);
    std::swap(values, next_values);
    const int num_next = max(0, min(kSubTile, task.key_end - begin - kSubTile));
    locate<Element>(task, begin + kSubTile, num_next, next_keys, next_values);
    Upcoming<Element> upcoming{next_keys, next_values, small_blocks ? num_next : 0, task.key_row_bytes,
                               task.value_row_bytes};
    unpack_rows(task, num_keys, keys, values);
    for (int j = num_keys; j < num_keys + kLanes; ++j) keys[j] = keys[num_keys - 1];
    for (int r = 0; r < num_rows;) {
      const int left = num_rows - r;
      float* to = scores + r * kSubTile;
      if (left >= 3) {
        score_rows<Dot, 4>(q + r, min(left, 4), keys, num_keys, task.head_dim, to, upcoming);
        r += 4;
      } else if (left == 2) {
        score_rows<Dot, 2>(q + r, 2, keys, num_keys, task.head_dim, to, upcoming);
        r += 2;
      } else {
        score_rows<Dot, 1>(q + r, 1, keys, num_keys, task.head_dim, to, upcoming);
        r += 1;
      }
      upcoming.count = 0;  // once is enough
    }
    int first = num_keys, last = 0;
    for (int r = 0; r < num_rows; ++r) {
      const Interval seen = visible_keys(task, r, begin, 0, num_keys);
      softmax_row<true, float>(task, scale, r, begin, seen, scores + r * kSubTile, scores + r * kSubTile, 0, num_keys);
      if (seen.begin < seen.end) {
        first = min(first, seen.begin);
        last = max(last, seen.end);
      }
    }
    for (int r = 0; r < num_rows;) {
      const int left = num_rows - r;
      float* acc = task.accumulator + r * task.accumulator_stride;
      const float* p = scores + r * kSubTile;
      auto add = [&]<int kRows>(std::integral_constant<int, kRows>) {
        accumulate_rows<Kv, kRows>(p, values, first, last, task.head_dim_v, acc, task.accumulator_stride);
        r += kRows;
      };
      if (left >= 4) {
        add(std::integral_constant<int, 4>{});
      } else if (left == 3) {
        add(std::integral_constant<int, 3>{});
      } else if (left == 2) {
        add(std::integral_constant<int, 2>{});
      } else {
        add(std::integral_constant<int, 1>{});
      }
    }
  }
}

}  // namespace
}  // namespace llmopt::attention
