// The likeliest drafts of several requests: EAGLE-2's dynamic tree, grown a level at a time on a decoder that drafts.
// Source: Y. Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", 2024.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "llmopt/step_plan.h"

namespace llmopt {

class Decoder;

// Hidden states of a target, copied out of a step's memory.
struct FeatureRows {
  // hidden: [num_tokens, num_layers, size] float32. Keeps the layers `taps` of the tokens `rows`, in their order.
  // Throws std::out_of_range where there is no such token or layer.
  FeatureRows(const float* hidden, int64_t num_tokens, int64_t num_layers, int64_t size, std::span<const int64_t> rows,
              std::span<const int64_t> taps);

  int64_t num_rows;
  std::vector<float> values;  // [num_rows, number of taps * size]
};

// What the head is shown first: the pairs (hidden states, next token) of each request that it has not seen, at least
// one of each, which it stores behind those it has.
struct TreeSearchInputs {
  std::vector<std::vector<int32_t>> block_tables;  // [R] with room for the pairs and width * (depth - 1) nodes more
  std::vector<int64_t> num_pairs;                  // [R] that the cache has already
  std::vector<int64_t> lengths;                    // [R] new pairs
  std::vector<int64_t> token_ids;                  // [sum of lengths]
  std::vector<int64_t> positions;                  // [sum of lengths] of the hidden states
  std::vector<const FeatureRows*> features;        // of all pairs, in any number of pieces
  int block_size = 0;
  int width = 0;                // nodes that go on at each level
  int depth = 0;                // levels at most, each one forward of the head; 0: the pairs are only stored
  std::vector<int64_t> counts;  // [R] nodes at most
  // No further level is made that would bring fewer tokens than this, over all requests. With a level's nodes as
  // likely as the last one's were for theirs, it brings m * m / n: m the chances of the nodes that go on, n of those
  // before them.
  double least_gain = 0;
  double least_chance = 0;  // nodes below it are left out
};

// Nodes of one request, likeliest first, so that the first few are a tree as well.
struct DraftTreeNodes {
  std::vector<int64_t> token_ids;  // of the target
  std::vector<int64_t> parents;    // indices of this list; -1: the newest token
  std::vector<float> scores;       // log of the chance of the path
};

class TreeSearch {
 public:
  // target_ids: of each token of the head's vocabulary.
  TreeSearch(Decoder& decoder, std::vector<int64_t> target_ids);
  ~TreeSearch();

  // Throws std::invalid_argument or std::out_of_range when the inputs do not fit together; see Decoder::step.
  std::vector<DraftTreeNodes> run(const TreeSearchInputs& inputs);
  // Levels of the last search.
  int num_levels() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace llmopt
