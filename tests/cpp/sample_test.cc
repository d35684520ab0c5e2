#include "llmopt/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace llmopt {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// The same by sorting, in double; `margin` is how far the draw lies from the nearest border between two tokens.
int64_t by_sorting(const std::vector<float>& row, const SampleParams& params, double& margin) {
  const auto size = static_cast<int64_t>(row.size());
  const float best = *std::max_element(row.begin(), row.end());
  std::vector<double> weight(size);
  for (int64_t i = 0; i < size; ++i) weight[i] = std::exp((double{row[i]} - best) / params.temperature);
  std::vector<int64_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return row[a] < row[b]; });
  if (params.top_k > 0 && params.top_k < size) {
    const float bound = row[order[size - params.top_k]];
    for (int64_t i = 0; i < size; ++i) weight[i] = row[i] >= bound ? weight[i] : 0;
  }
  margin = 1;
  const double total = std::accumulate(weight.begin(), weight.end(), 0.0);
  double dropped = 0;
  for (int64_t i = 0; i + 1 < size && params.top_p < 1; ++i) {
    dropped += weight[order[i]];
    margin = std::min(margin, std::abs(dropped / total - (1 - params.top_p)));
    if (dropped / total > 1 - params.top_p) break;
    weight[order[i]] = 0;
  }
  for (double& w : weight) w = w >= params.min_p ? w : 0;
  const double target = params.draw * std::accumulate(weight.begin(), weight.end(), 0.0);
  double cumulative = 0;
  for (int64_t i = 0; i < size; ++i) {
    cumulative += weight[i];
    margin = std::min(margin, std::abs(cumulative - target) / total);
    if (cumulative > target) return i;
  }
  return size - 1;
}

TEST(Sampler, DrawsWhatSortingGivesForEveryFilterAndSize) {
  std::mt19937 random(0);
  Sampler sampler;
  int checked = 0;
  for (int size : {1, 2, 15, 63, 64, 65, 127, 1000, 1024, 1025, 5000}) {
    for (int trial = 0; trial < 200; ++trial) {
      std::normal_distribution<float> normal(0, trial % 2 ? 1.0f : 6.0f);
      std::vector<float> row(size);
      for (float& x : row) x = normal(random);
      for (int i = 0; i + 1 < size && trial % 5 == 0; i += 3) row[i] = -kInf;
      const double draw = std::uniform_real_distribution<double>(0, 1)(random);
      const int64_t top_ks[] = {0, 1, 3, 50, size};
      const double top_ps[] = {1.0, 0.95, 0.3, 0.0};
      const double min_ps[] = {0.0, 0.02, 1.0};
      const SampleParams params{trial % 3 ? 0.7f : 1.5f, top_ks[random() % 5], top_ps[random() % 4],
                                min_ps[random() % 3], draw};
      double margin;
      const int64_t expected = by_sorting(row, params, margin);
      if (margin < 1e-6) continue;
      const int64_t found = sampler(row.data(), size, *std::max_element(row.begin(), row.end()), params);
      EXPECT_EQ(found, expected) << "size " << size << " top_k " << params.top_k << " top_p " << params.top_p
                                 << " min_p " << params.min_p;
      ++checked;
    }
  }
  EXPECT_GT(checked, 1500);
}

TEST(Sampler, ReachesTheLastTokenAndNeverOneOfNoProbability) {
  Sampler sampler;
  std::vector<float> row(3000, -kInf);
  row[0] = row[2500] = 2.0f;
  const double below_one = std::nextafter(1.0, 0.0);
  EXPECT_EQ(sampler(row.data(), 3000, 2.0f, {1.0f, 0, 1.0, 0.0, 0.0}), 0);
  EXPECT_EQ(sampler(row.data(), 3000, 2.0f, {1.0f, 0, 1.0, 0.0, 0.5}), 2500);
  EXPECT_EQ(sampler(row.data(), 3000, 2.0f, {1.0f, 0, 1.0, 0.0, below_one}), 2500);
  EXPECT_EQ(sampler(row.data(), 3000, 2.0f, {1.0f, 5, 0.9, 0.1, below_one}), 2500);
}

}  // namespace
}  // namespace llmopt
