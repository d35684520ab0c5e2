// The running softmax of one row over tiles of scores, in units of log2.
#pragma once

#include <bit>

#include "core/attention/kernels.h"
#include "core/attention/storage.h"

namespace llmopt::attention {
namespace {

constexpr float kNegativeInfinity = -__builtin_inff();

// Keys [begin, end) of a tile.
struct Interval {
  int begin, end;
};

// Bits of the drafts that row r sees, without those before the window; 0: it is no draft.
LLMOPT_INLINE uint64_t draft_mask(const Task& task, int r) {
  return task.draft_masks ? task.draft_masks[r / task.group] : 0;
}
LLMOPT_INLINE uint64_t inside_window(const Task& task, uint64_t mask) {
  if (task.sliding_window > 0) {
    for (int hidden = std::popcount(mask) - task.sliding_window; hidden > 0; --hidden) mask &= mask - 1;
  }
  return mask;
}

// visible_keys of a draft in a tree: from the first to the last key that it sees, some between may be hidden.
inline Interval visible_to_draft(const Task& task, uint64_t mask, int first_key, int low, int num_keys) {
  const int at = task.first_draft - first_key;  // where drafts begin in the tile
  uint64_t drafts = inside_window(task, mask);
  if (num_keys - at < 64) drafts &= num_keys > at ? (uint64_t{1} << (num_keys - at)) - 1 : 0;
  if (low > at) drafts &= low - at < 64 ? ~uint64_t{0} << (low - at) : 0;
  const int end = min(num_keys, at);
  const int begin = task.sliding_window > 0 ? max(low, at + std::popcount(mask) - task.sliding_window) : low;
  if (drafts == 0) return begin < end ? Interval{begin, end} : Interval{0, 0};
  return {begin < end ? begin : at + std::countr_zero(drafts), at + static_cast<int>(std::bit_width(drafts))};
}

// What row r sees of the keys [low, num_keys) behind `first_key`: causal, and inside the window.
LLMOPT_INLINE Interval visible_keys(const Task& task, int r, int first_key, int low, int num_keys) {
  if (const uint64_t mask = draft_mask(task, r)) return visible_to_draft(task, mask, first_key, low, num_keys);
  const int position = task.first_position + r / task.group;
  const int end = max(0, min(num_keys, position + 1 - first_key));
  const int begin = task.sliding_window > 0 ? max(low, position + 1 - task.sliding_window - first_key) : low;
  return {min(begin, end), end};
}

// Scores of row r at drafts that are not on the path to it become -infinity.
inline void hide_drafts(const Task& task, int r, int first_key, Interval seen, float* scores) {
  const uint64_t mask = inside_window(task, draft_mask(task, r));
  const int at = task.first_draft - first_key;
  for (int j = max(at, seen.begin); j < seen.end; ++j) {
    if ((mask >> (j - at) & 1) == 0) scores[j] = kNegativeInfinity;
  }
}

// Factors between raw scores (dot products) and exponents.
struct SoftmaxScale {
  float factor;  // exponent = score * factor
  float cap_in;  // with a cap: score = tanh(score * cap_in) * cap_out first
  float cap_out;
  bool capped;

  explicit SoftmaxScale(const Task& task) : capped(task.softcap > 0) {
    constexpr float kLog2E = 1.44269504088896340736f;
    factor = capped ? kLog2E : task.scale * kLog2E;
    cap_in = capped ? task.scale / task.softcap : 0;
    cap_out = task.softcap;
  }
};

inline void start_rows(const Task& task, int num_rows) {
  std::memset(task.accumulator, 0, num_rows * task.accumulator_stride * sizeof(float));
  for (int r = 0; r < num_rows; ++r) {
    task.row_max[r] = kNegativeInfinity;
    task.row_sum[r] = 0;
  }
}

LLMOPT_INLINE void store_probabilities(float* to, Vec p) { store(to, p); }
LLMOPT_INLINE void store_probabilities(uint16_t* to, Vec p) { store(to, to_bfloat16(p)); }

// Turn scores[seen] of row r, a tile of keys from `first_key` on, into probabilities relative to the new maximum, zeros
// elsewhere in [low, high); update the row's max and sum and rescale its accumulator. `low` and `high` need not be
// multiples of kLanes, but `scores` and `probs` have room to the next one. `probs` may be `scores`.
template <bool kExact, class Probability>
LLMOPT_INLINE void softmax_row(const Task& task, const SoftmaxScale& scale, int r, int first_key, Interval seen,
                               float* scores, Probability* probs, int low, int high) {
  const int first = seen.begin / kLanes * kLanes;
  const int last = static_cast<int>(round_up(seen.end, kLanes));
  for (int j = low / kLanes * kLanes; j < (seen.begin < seen.end ? first : high); j += kLanes) {
    store_probabilities(probs + j, Vec{});
  }
  if (seen.begin >= seen.end) return;
  for (int j = last; j < high; j += kLanes) store_probabilities(probs + j, Vec{});

  if (scale.capped) {
    for (int j = first; j < last; j += kLanes) {
      store(scores + j, tanh(load_as<Vec>(scores + j) * scale.cap_in) * scale.cap_out);
    }
  }
  // Scores outside of the interval become -infinity, in the first and last vector only.
  auto hide = [&](int j) {
    const IntVec lane = iota() + j;
    const Vec score = load_as<Vec>(scores + j);
    store(scores + j, select((lane >= seen.begin) & (lane < seen.end), score, splat(kNegativeInfinity)));
  };
  if (first != seen.begin) hide(first);
  if (last != seen.end) hide(last - kLanes);
  const bool has_holes = draft_mask(task, r) != 0;
  if (has_holes) hide_drafts(task, r, first_key, seen, scores);

  Vec best = splat(kNegativeInfinity), best2 = best;
  int j = first;
  for (; j + 2 * kLanes <= last; j += 2 * kLanes) {
    best = larger(best, load_as<Vec>(scores + j));
    best2 = larger(best2, load_as<Vec>(scores + j + kLanes));
  }
  if (j < last) best = larger(best, load_as<Vec>(scores + j));
  const float old_max = task.row_max[r];
  const float tile_max = max_lanes(larger(best, best2)) * scale.factor;
  const float new_max = old_max > tile_max ? old_max : tile_max;
  const Vec shift = splat(new_max);
  const Vec factor = splat(scale.factor);
  Vec sum{}, sum2{};
  // Hidden lanes must be exact zeros, so the edges clear them after the exponential (its floor is 2^-126).
  auto exponential = [&](int j) { return exp2_nonpositive<kExact>(load_as<Vec>(scores + j) * factor - shift); };
  auto edge = [&](int j) {
    const IntVec lane = iota() + j;
    const Vec p = select((lane >= seen.begin) & (lane < seen.end), exponential(j), Vec{});
    store_probabilities(probs + j, p);
    return p;
  };
  j = first;
  int stop = last;
  if (has_holes) {
    for (; j < stop; j += kLanes) {
      const IntVec lane = iota() + j;
      const IntVec is_seen =
          (lane >= seen.begin) & (lane < seen.end) & (load_as<Vec>(scores + j) != splat(kNegativeInfinity));
      const Vec p = select(is_seen, exponential(j), Vec{});
      store_probabilities(probs + j, p);
      sum += p;
    }
    seen.begin = first;
    seen.end = last;
  }
  if (first != seen.begin) {
    sum += edge(j);
    j += kLanes;
  }
  if (last != seen.end && j < last) stop -= kLanes;
  for (; j + 2 * kLanes <= stop; j += 2 * kLanes) {
    const Vec p = exponential(j), p2 = exponential(j + kLanes);
    store_probabilities(probs + j, p);
    store_probabilities(probs + j + kLanes, p2);
    sum += p;
    sum2 += p2;
  }
  if (j < stop) {
    const Vec p = exponential(j);
    store_probabilities(probs + j, p);
    sum += p;
  }
  if (stop < last) sum2 += edge(stop);

  float rescale = 1;
  if (new_max > old_max) {
    rescale = old_max == kNegativeInfinity ? 0 : exp2_nonpositive<true>(splat(old_max - new_max))[0];
    float* acc = task.accumulator + r * task.accumulator_stride;
    for (int c = 0; c < task.head_dim_v; c += kLanes) store(acc + c, load_as<Vec>(acc + c) * rescale);
  }
  task.row_max[r] = new_max;
  task.row_sum[r] = task.row_sum[r] * rescale + sum_lanes(sum + sum2);
}

}  // namespace
}  // namespace llmopt::attention
