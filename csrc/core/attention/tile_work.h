// Tile instructions in small pieces, to stand between vector instructions: both units work at the same time.
#pragma once

#include "core/attention/kernels.h"
#include "core/attention/key_chunk.h"
#include "core/attention/simd.h"

namespace llmopt::attention {
namespace {

constexpr int kSpanKeys = 1024;  // keys whose values are packed together: they stay in the second-level cache
constexpr int kChunkKeys = 128;  // keys whose scores a group of rows looks at together, at most
constexpr int kStepKeys = 32;    // keys of a round of tiles

using KeySpan = KeyChunk<kSpanKeys>;

// Products that wait to be computed, in pieces of a few tile instructions: scores^T of one group, acc^T += V^T p of
// another. First the values, then the scores. Tiles 0-3: sums, 4-5: values or keys, 6-7:
// probabilities or queries.
class TileWork {
 public:
  TileWork(const Task& task, const KeySpan& span, const uint32_t* values)
      : span_(span), values_(values), head_dim_(task.head_dim), head_dim_v_(task.head_dim_v) {}

  // Keys [low, high), multiples of kStepKeys. A half group has no more than 16 rows.
  void add_scores(const uint32_t* query, bool is_half, int low, int high, float* scores) {
    query_ = query;
    scores_half_ = is_half;
    score_begin_ = score_key_ = low;
    score_end_ = high;
    scores_ = scores;
  }
  void add_values(const uint32_t* probs, bool is_half, int low, int high, float* acc) {
    probs_ = probs;
    values_half_ = is_half;
    value_begin_ = value_key_ = low;
    value_end_ = high;
    acc_ = acc;
    column_ = 0;
  }

  // How many calls of advance() are left.
  int size() const {
    const int columns = (head_dim_v_ - column_) / 32;
    const int values = (value_end_ - value_begin_) / kStepKeys * columns - (value_key_ - value_begin_) / kStepKeys;
    return (score_end_ - score_key_) / kStepKeys + (has_values() ? values : 0);
  }

  LLMOPT_INLINE void advance() {
    if (has_values()) {
      values_half_ ? value_step<true>() : value_step<false>();
    } else if (score_key_ < score_end_) {
      scores_half_ ? score_step<true>() : score_step<false>();
    }
  }
  void finish() {
    while (has_values() || score_key_ < score_end_) advance();
  }

 private:
  bool has_values() const { return column_ < head_dim_v_; }

  // 32 keys, 32 rows; half of them: tiles 1 and 3 have no part in it.
  template <bool kHalf>
  LLMOPT_INLINE void score_step() {
    const int64_t stride = head_dim_ * 2;
    const uint16_t *keys = span_.keys[score_key_ / 16], *keys2 = span_.keys[score_key_ / 16 + 1];
    const uint32_t *query = query_, *query2 = query + head_dim_ / 2 * kLanes;
    float *out = scores_ + (score_key_ - score_begin_) * kLanes, *out2 = out + kChunkKeys * kLanes;
    asm volatile("" : : : "memory");
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (!kHalf) {
      _tile_zero(1);
      _tile_zero(3);
    }
    for (int d = 0; d < head_dim_; d += 32) {
      _tile_loadd(4, keys + d, stride);
      _tile_loadd(6, query + d / 2 * kLanes, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (!kHalf) {
        _tile_loadd(7, query2 + d / 2 * kLanes, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      _tile_loadd(5, keys2 + d, stride);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (!kHalf) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, 64);
    if constexpr (!kHalf) _tile_stored(1, out2, 64);
    _tile_stored(2, out + 16 * kLanes, 64);
    if constexpr (!kHalf) _tile_stored(3, out2 + 16 * kLanes, 64);
    asm volatile("" : : : "memory");
    score_key_ += kStepKeys;
  }

  // 32 keys, 32 columns, 32 rows.
  template <bool kHalf>
  LLMOPT_INLINE void value_step() {
    constexpr int kTile = 16 * kLanes;
    const uint32_t* values = values_ + (value_key_ / 32 * (head_dim_v_ / 16) + column_ / 16) * kTile;
    const uint32_t *probs = probs_ + (value_key_ - value_begin_) / 2 * kLanes,
                   *probs2 = probs + kChunkKeys / 2 * kLanes;
    float *out = acc_ + column_ * kLanes, *out2 = out + head_dim_v_ * kLanes;
    asm volatile("" : : : "memory");
    if (value_key_ == value_begin_) {
      _tile_loadd(0, out, 64);
      _tile_loadd(2, out + 16 * kLanes, 64);
      if constexpr (!kHalf) {
        _tile_loadd(1, out2, 64);
        _tile_loadd(3, out2 + 16 * kLanes, 64);
      }
    }
    _tile_loadd(4, values, 64);
    _tile_loadd(6, probs, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (!kHalf) {
      _tile_loadd(7, probs2, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_loadd(5, values + kTile, 64);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (!kHalf) _tile_dpbf16ps(3, 5, 7);
    value_key_ += kStepKeys;
    if (value_key_ == value_end_) {
      _tile_stored(0, out, 64);
      _tile_stored(2, out + 16 * kLanes, 64);
      if constexpr (!kHalf) {
        _tile_stored(1, out2, 64);
        _tile_stored(3, out2 + 16 * kLanes, 64);
      }
      value_key_ = value_begin_;
      column_ += 32;
    }
    asm volatile("" : : : "memory");
  }

  const KeySpan& span_;
  const uint32_t* const values_;
  const int head_dim_, head_dim_v_;
  const uint32_t *query_ = nullptr, *probs_ = nullptr;
  float *scores_ = nullptr, *acc_ = nullptr;
  int score_key_ = 0, score_begin_ = 0, score_end_ = 0;
  int value_key_ = 0, value_begin_ = 0, value_end_ = 0;
  int column_ = 1 << 30;  // no values
  bool scores_half_ = false, values_half_ = false;
};

}  // namespace
}  // namespace llmopt::attention
