// One forward of a whole decoder: one call per step, on a team of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "llmopt/decoder_spec.h"
#include "llmopt/layer_cache.h"
#include "llmopt/step_plan.h"
#include "llmopt/thread_team.h"

namespace llmopt {

struct DecoderInputs {
  std::span<const int64_t> token_ids;       // [T]
  std::span<const int64_t> positions;       // [T]
  std::span<const int64_t> logits_indices;  // [R] packed tokens whose logits are wanted, ascending
  float* logits = nullptr;                  // [R, num_logits] float32, or null: only the best of each row
  int64_t* best = nullptr;                  // [R] index of the largest logit; null: not wanted
  float* best_values = nullptr;             // [R] that logit
  // Tokens that may not be chosen: logits[banned_rows[k], banned_ids[k]] is -inf. Ids outside the vocabulary do no
  // harm.
  std::span<const int64_t> banned_rows = {};  // [K] below R
  std::span<const int64_t> banned_ids = {};   // [K]
  float* hidden = nullptr;                    // [T, hidden_layers of the spec, hidden_size], or null: not wanted
  // Of a decoder that drafts (DraftFront), one of the first two:
  const float* features = nullptr;  // [T, hidden], or as wide as fc for kSplit
  const float* states = nullptr;    // [T, hidden] rows of `states_out` of earlier steps
  float* states_out = nullptr;      // [R, hidden] the residual stream of the rows whose logits are wanted
  // The best tokens of each row, best first, equal ones in ascending order, instead of logits and best.
  int top = 0;
  int32_t* top_ids = nullptr;      // [R, top]
  float* top_log_probs = nullptr;  // [R, top] logarithm of their softmax
};

// The spec is checked when the decoder is made: sizes that do not fit together throw std::invalid_argument.
// Any mixture of prefill chunks, decodes and several rows per request is one call. Not safe for two callers at once.
class Decoder {
 public:
  Decoder(DecoderSpec spec, std::vector<LayerCache> caches, std::shared_ptr<ThreadTeam> team);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  // The plan has the step's block tables, lengths and slots (StepPlan::update). Keys and values of the new tokens are
  // written to the caches. What a request gets does not depend on which others are in the step, up to the choice of
  // kernel by the number of rows.
  // Throws std::out_of_range on a token id, position or block that does not exist; nothing is written then.
  void step(const DecoderInputs& inputs, StepPlan& plan);

  const DecoderSpec& spec() const;

  // While on, each step adds the time of its phases, seen from the calling thread: a phase ends with the barrier behind
  // it. Switching on starts from zero.
  void set_profiling(bool on);
  bool is_profiling() const;
  // Seconds per phase, in the order of the step; what has not run is left out.
  std::vector<std::pair<const char*, double>> profile() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace llmopt
