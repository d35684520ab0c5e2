// The running softmax of one row over tiles of scores, in units of log2.
#pragma once

#include "core/attention/kernels.h"
#include "core/attention/storage.h"

namespace llmopt::attention {
namespace {

constexpr float kNegativeInfinity = -__builtin_inff();

// Keys [begin, end) of a tile.
struct Interval {
  int begin, end;
};

// What row r sees of the `num_keys` keys from `first_key` on: causal, and inside the window.
LLMOPT_INLINE Interval visible_keys(const Task& task, int r, int first_key, int num_keys) {
  const int position = task.first_position + r / task.group;
  const int end = max(0, min(num_keys, position + 1 - first_key));
  const int begin = task.sliding_window > 0 ? max(0, position + 1 - task.sliding_window - first_key) : 0;
  return {min(begin, end), end};
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

// Turn scores[seen] of row r into probabilities relative to the new maximum, zeros elsewhere in [low, high); update the
// row's max and sum and rescale its accumulator. `low` and `high` need not be multiples of kLanes, but `scores` and
// `probs` have room to the next one. `probs` may be `scores`.
template <bool kExact, class Probability>
LLMOPT_INLINE void softmax_row(const Task& task, const SoftmaxScale& scale, int r, Interval seen, float* scores,
                               Probability* probs, int low, int high) {
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
