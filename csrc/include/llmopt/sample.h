// One token of a row of logits, drawn at a given random number: temperature, top-k, top-p, min-p, inverse transform.
//
// Filters follow Hugging Face in order. Ties with the last of top-k stay, as there; of equal ones at the border of
// top-p the first ids go, where transformers takes what an unstable sort gives it. Nothing is sorted as a whole.
#pragma once

#include <cstdint>
#include <vector>

namespace llmopt {

struct SampleParams {
  float temperature;  // above 0
  int64_t top_k;      // the largest scores that stay, ties with the last of them too; 0, or the size and more: all
  double top_p;       // the smaller end is dropped as far as it sums up to 1 - top_p at most; 1: nothing is
  double min_p;       // what has less than this share of the best one's probability is dropped; 0: nothing is
  double draw;        // in [0, 1): where the cumulative distribution, in order of ids, is inverted
};

// Draws tokens, one row at a time. Owns its scratch, so one per thread.
class Sampler {
 public:
  // row: `size` logits, -inf allowed. best: the largest of them, finite.
  int64_t operator()(const float* row, int64_t size, float best, const SampleParams& params);

 private:
  struct Candidate {
    int64_t id;
    float weight;  // probability / probability of the best one
  };

  void keep_largest(int64_t k);
  void collect(const std::vector<float>& values, float bound);
  void drop_small_end(double allowed);

  std::vector<float> scores_, weights_, selected_;
  std::vector<Candidate> candidates_;  // what the filters left, in order of ids
  std::vector<Candidate> by_weight_;
};

}  // namespace llmopt
