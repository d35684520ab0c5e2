#include "llmopt/sample.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>

// Compiled without contraction of a * b + c (see CMakeLists.txt), so that every clone of a loop gives the same bits.
// The thread sanitizer is not ready yet when the loader picks a clone.
#if defined(LLMOPT_X86) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#define LLMOPT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LLMOPT_CLONES
#endif

namespace llmopt {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 64;          // logits whose largest one stands for them
constexpr int64_t kSumBlock = 16 * 64;  // weights that are summed up before the place of the draw is looked for
constexpr int kLanes = 16;              // partial sums of a block, a fixed number so that the order of additions is

// Scores, and exp(score - largest score).
// exp(x) = 2^(x log2 e): the integer part moves the exponent, a polynomial gives 2^fraction on [-0.5, 0.5], fitted for
// the least maximal relative error, 2e-7. Below 2^-126 the weight is 0.
LLMOPT_CLONES void weigh(const float* row, int64_t size, float temperature, float largest, float* scores,
                         float* weights) {
  for (int64_t i = 0; i < size; ++i) {
    const float score = row[i] / temperature;
    scores[i] = score;
    const float x = (score - largest) * 1.44269504089f;
    const float clamped = x > -126.0f ? x : -126.0f;
    const float shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the integer lands in the low bits
    const float fraction = clamped - (shifted - 12582912.0f);
    float p = 0.0013276474783f;
    p = p * fraction + 0.0096755409614f;
    p = p * fraction + 0.0555071309209f;
    p = p * fraction + 0.2402212023735f;
    p = p * fraction + 0.6931469440461f;
    p = p * fraction + 1.0f;
    const uint32_t exponent = std::bit_cast<uint32_t>(shifted) << 23;
    const float power = std::bit_cast<float>(std::bit_cast<uint32_t>(p) + exponent);
    weights[i] = x > -126.0f ? power : 0.0f;
  }
}

LLMOPT_CLONES float largest_of(const float* values, int64_t size) {
  float lanes[kLanes];
  for (float& lane : lanes) lane = -kInfinity;
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = std::max(lanes[lane], values[i + lane]);
  }
  for (int64_t i = whole; i < size; ++i) lanes[0] = std::max(lanes[0], values[i]);
  return *std::max_element(lanes, lanes + kLanes);
}

LLMOPT_CLONES double sum_of(const float* values, int64_t size) {
  double lanes[kLanes] = {};
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += values[i + lane];
  }
  for (int64_t i = whole; i < size; ++i) lanes[0] += values[i];
  double total = 0;
  for (double lane : lanes) total += lane;
  return total;
}

double sum_of_blocks(const float* values, int64_t size) {
  double total = 0;
  for (int64_t i = 0; i < size; i += kSumBlock) total += sum_of(values + i, std::min(kSumBlock, size - i));
  return total;
}

// Inverts the cumulative distribution of all weights: whole blocks first, then within one.
int64_t invert_all(const float* weights, int64_t size, double draw) {
  const double target = draw * sum_of_blocks(weights, size);
  double before = 0;
  int64_t last = 0;
  for (int64_t start = 0; start < size; start += kSumBlock) {
    const int64_t count = std::min(kSumBlock, size - start);
    const double sum = sum_of(weights + start, count);
    if (before + sum <= target) {
      before += sum;
      continue;
    }
    double cumulative = before;
    for (int64_t i = start; i < start + count; ++i) {
      if (weights[i] == 0.0f) continue;
      last = i;
      cumulative += weights[i];
      if (cumulative > target) return i;
    }
    return last;  // the sums of lanes were larger by a rounding
  }
  for (int64_t i = size - 1; i > 0; --i) {  // the same, at the very end
    if (weights[i] > 0.0f) return i;
  }
  return 0;
}

}  // namespace

int64_t Sampler::operator()(const float* row, int64_t size, float best, const SampleParams& params) {
  scores_.resize(size);
  weights_.resize(size);
  weigh(row, size, params.temperature, best / params.temperature, scores_.data(), weights_.data());
  const bool has_top_k = params.top_k > 0 && params.top_k < size;
  const bool has_top_p = params.top_p < 1.0;
  if (!has_top_k && !has_top_p && params.min_p <= 0.0) return invert_all(weights_.data(), size, params.draw);

  const auto sum_of_candidates = [this] {
    double sum = 0;
    for (const Candidate& c : candidates_) sum += c.weight;
    return sum;
  };
  if (has_top_k) {
    keep_largest(params.top_k);
    if (has_top_p) drop_small_end((1.0 - params.top_p) * sum_of_candidates());
  } else if (has_top_p) {
    const double total = sum_of_blocks(weights_.data(), size);
    const double allowed = (1.0 - params.top_p) * total;
    collect(weights_, static_cast<float>(allowed / static_cast<double>(size)));  // all below: `allowed` at most
    drop_small_end(allowed - (total - sum_of_candidates()));
  } else {
    collect(weights_, static_cast<float>(params.min_p));
  }
  if (params.min_p > 0.0) {
    std::erase_if(candidates_, [&](const Candidate& c) { return c.weight < params.min_p; });
  }
  const double target = params.draw * sum_of_candidates();
  double cumulative = 0;
  for (const Candidate& c : candidates_) {
    cumulative += c.weight;
    if (cumulative > target) return c.id;
  }
  return candidates_.back().id;  // draw * sum was rounded up to the sum
}

// Makes candidates of the k largest scores, and of ties with the last of them. At least k scores reach the k-th largest
// of the blocks' largest ones, so only those are looked at one by one.
void Sampler::keep_largest(int64_t k) {
  const auto size = static_cast<int64_t>(scores_.size());
  const auto kth_largest = [&] {
    std::nth_element(selected_.begin(), selected_.begin() + (k - 1), selected_.end(), std::greater<>());
    return selected_[k - 1];
  };
  selected_.clear();
  for (int64_t i = 0; i < size; i += kBlock) selected_.push_back(largest_of(&scores_[i], std::min(kBlock, size - i)));
  collect(scores_, k <= static_cast<int64_t>(selected_.size()) ? kth_largest() : -kInfinity);
  selected_.clear();
  for (const Candidate& c : candidates_) selected_.push_back(scores_[c.id]);
  const float bound = kth_largest();
  std::erase_if(candidates_, [&](const Candidate& c) { return scores_[c.id] < bound; });
}

// Makes candidates of the ids whose value is `bound` or more.
void Sampler::collect(const std::vector<float>& values, float bound) {
  candidates_.clear();
  const auto size = static_cast<int64_t>(values.size());
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t end = std::min(start + kBlock, size);
    if (!(largest_of(&values[start], end - start) >= bound)) continue;
    for (int64_t i = start; i < end; ++i) {
      if (values[i] >= bound) candidates_.push_back({i, weights_[i]});
    }
  }
}

// Drops the smallest candidates, of equal ones the first ids, as long as they sum up to `allowed` at most; the last one
// stays. A quickselect on sums: of each half it is known whether it goes as a whole.
void Sampler::drop_small_end(double allowed) {
  const auto is_less = [](const Candidate& a, const Candidate& b) {
    return a.weight != b.weight ? a.weight < b.weight : a.id < b.id;
  };
  by_weight_ = candidates_;
  auto low = by_weight_.begin(), high = by_weight_.end();  // what is below `low` goes; `high` and more stays
  while (high - low > 1) {
    const auto middle = low + (high - low) / 2;
    std::nth_element(low, middle, high, is_less);
    double sum = 0;
    for (auto c = low; c != middle; ++c) sum += c->weight;
    if (sum <= allowed) {
      allowed -= sum;
      low = middle;
    } else {
      high = middle;
    }
  }
  const Candidate first = *low;
  std::erase_if(candidates_, [&](const Candidate& c) { return is_less(c, first); });
}

}  // namespace llmopt
