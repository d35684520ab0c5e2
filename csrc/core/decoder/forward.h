// The parts of a step and what they share. A step is one run of the team; what each thread does in it reads from top to
// bottom in Forward::run (step.cc).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/attention/kernels.h"
#include "core/decoder/phase_clock.h"
#include "core/decoder/row_kernels.h"
#include "core/decoder/workspace.h"
#include "llmopt/argmax.h"
#include "llmopt/attention.h"
#include "llmopt/decoder.h"

namespace llmopt::decoder {

struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

// Part `index` of `count` equal parts of 0..n, cut at multiples of `unit`.
inline Range share(int64_t n, int64_t index, int64_t count, int64_t unit = 1) {
  const int64_t units = (n + unit - 1) / unit;
  const int64_t end = units * (index + 1) / count * unit;
  return {units * index / count * unit, end < n ? end : n};
}

// Rows that go through the matrices together, and how their work is divided.
//   few rows:  one block of all rows; every thread computes some panels of each matrix, and they meet at barriers.
//   many rows: every thread takes blocks of its own rows through all panels and meets the others around attention only.
struct Block {
  Range rows;
  int part = 0, parts = 1;  // of the panels
  bool is_own = false;      // no other thread works on these rows
};

// A token that a row of logits may not choose.
struct Banned {
  int64_t id;
  int64_t row;
};

// What a thread keeps between steps, and the block it is working on.
struct Worker {
  int thread = 0, size = 1;
  std::vector<Block> blocks;
  LinearScratch scratch;
  InputSet inputs;         // rows that this thread converts for itself
  InputSet products;       // of own blocks: outputs of `up` in the form that `down` reads
  Array<float> row;        // one row on its way
  Array<float> qkv, mlp;   // of own blocks
  Array<float> logits;     // a chunk of columns for all rows whose logits are wanted
  std::vector<Best> best;  // [R] of this thread's columns

  // Of the next matrix, to be fetched while this thread waits.
  std::span<const std::byte> ahead;
};

class Forward {
 public:
  Forward(DecoderSpec spec, std::vector<LayerCache> caches, std::shared_ptr<ThreadTeam> team);

  // Throws before anything is written, see Decoder::step.
  void step(const DecoderInputs& inputs, StepPlan& plan);

  const DecoderSpec& spec() const { return spec_; }
  PhaseClock& clock() { return clock_; }

 private:
  // decoder.cc
  void check(const DecoderInputs& inputs, StepPlan& plan);

  // step.cc
  void prepare();
  void prepare_shared(const PackedMatrix& matrix, int64_t num_rows, InputSet& set);
  void divide(Worker& worker) const;
  void run(Worker& worker);
  void barrier(Worker& worker);
  void mark(const Worker& worker, Phase phase) {
    if (worker.thread == 0) clock_.mark(phase);
  }
  const float* norm(const NormSpec& spec, const float* x, int64_t n, float* out) const;
  // Rows of the block in the form that `matrix` reads; row_of(row of the step) points at its values.
  template <class RowOf>
  const InputRows& fill(Worker& worker, const Block& block, const PackedMatrix& matrix, const RowOf& row_of);
  void multiply(Worker& worker, const Block& block, const LinearSpec& linear, const InputRows& input,
                LinearOutput output, Phase phase, const PackedMatrix* next);
  // The product joins the residual stream, through a norm where there is one.
  void multiply_into_residual(Worker& worker, const Block& block, const LinearSpec& linear, const InputRows& input,
                              const NormSpec& after, Phase phase, const PackedMatrix* next);
  void embed(Worker& worker, const Block& block);
  void embed_token(int64_t row, float* out) const;
  // Rows of the residual stream that enter `layer`, for those who want to see them.
  void show_hidden(Worker& worker, int layer);
  void mlp(Worker& worker, const Block& block, const LayerSpec& layer, const PackedMatrix* next);

  // draft.cc
  bool is_split() const { return spec_.draft.kind == DraftFront::Kind::kSplit; }
  void draft_front(Worker& worker, const Block& block);
  const float* join_token(Worker& worker, int64_t row) const;
  const float* normed_features(Worker& worker, int64_t row) const;
  const float* split_input(Worker& worker, int64_t row) const;
  void choose_top(Worker& worker);

  // attend.cc
  AttentionArgs attention_args(int layer) const;
  void find_attention_kinds();
  void check_attention(StepPlan& plan, int64_t num_tokens);
  void prepare_attention();
  void project_qkv(Worker& worker, const Block& block, int layer);
  static int num_units(const AttentionSpec& spec);
  void rotate_and_store(float* qkv, int64_t row, int unit, int layer) const;
  void rotate_and_store_head(float* values, int64_t row, int head, int layer) const;
  void start_attention(const Worker& worker, int layer);
  void attend(Worker& worker);
  void project_output(Worker& worker, const Block& block, int layer);

  // moe.cc
  void prepare_moe();
  void moe(Worker& worker, const LayerSpec& layer);
  void choose_experts(const MoeSpec& moe, int64_t row);
  void group_by_expert(const MoeSpec& moe);
  template <class Compute>
  void share_experts(std::atomic<int64_t>& next, int64_t num_panels, const Compute& compute);

  // head.cc
  void prepare_head();
  void head(Worker& worker);
  void finish_head();

  DecoderSpec spec_;
  std::vector<LayerCache> caches_;
  std::shared_ptr<ThreadTeam> team_;
  const RowKernels& kernels_;
  const attention::Kernels& attention_kernels_;
  PhaseClock clock_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<int> attention_kinds_;   // the first layer of each
  int64_t num_positions_;              // of every table that the layers use
  int64_t num_slots_of_cache_;         // of the smallest cache
  int64_t max_width_ = 0;              // widest row that a thread holds on its way between two matrices
  int64_t max_qkv_ = 0, max_mlp_ = 0;  // widest output of `qkv` and `up`
  bool has_after_norms_ = false, has_mlp_ = false, has_experts_ = false;

  // The step.
  DecoderInputs inputs_;
  StepPlan* plan_ = nullptr;
  int64_t num_rows_ = 0;
  bool has_own_blocks_ = false;
  InputSet shared_inputs_;                  // rows converted by all threads
  InputSet shared_products_;                // outputs of `up` in the form that `down` reads
  InputSet head_inputs_;                    // [R, hidden]
  std::vector<Banned> banned_;              // by token id
  Array<float> logits_;                     // [R, num_logits] where the top tokens are chosen from them
  Array<float> residual_;                   // [T, hidden]
  Array<float> branch_;                     // [T, hidden] what a norm looks at before it joins the residual stream
  Array<float> qkv_, mlp_;                  // [T, ...] of shared blocks
  Array<std::byte> query_;                  // [T, Hq * D] dtype of the cache
  Array<std::byte> attended_;               // the same
  std::optional<AttentionCall> attention_;  // of the layer at hand

  // Experts. A slot is a row of an expert, whose rows lie together.
  Array<float> normed_;          // [T, hidden]
  Array<float> router_logits_;   // [T, E]
  Array<int32_t> top_experts_;   // [T, k] ascending
  Array<float> top_weights_;     // [T, k]
  Array<int64_t> top_slots_;     // [T, k]
  Array<int64_t> slot_rows_;     // [slots] row of the step
  Array<int64_t> expert_begin_;  // [E] first slot
  Array<int64_t> expert_rows_;   // [E] number of rows
  std::vector<int> active_experts_;
  int64_t num_slots_ = 0;
  std::vector<InputBuffer> expert_inputs_, expert_products_;  // [E] rows of one expert each
  Array<float> expert_mlp_;                                   // [slots, width of up]
  Array<float> expert_out_;                                   // [slots, hidden]
  std::atomic<int64_t> next_up_{0}, next_down_{0};
};

// The rest of these templates is in every file that uses them: they are small, and callers differ in the lambda only.

inline void Forward::barrier(Worker& worker) {
  team_->barrier(worker.ahead);
  mark(worker, Phase::kWait);
}

// Converting a row twice costs less than waiting for a neighbour to do it.
inline bool is_cheap_to_fill(int64_t num_rows, int64_t num_inputs) {
  return num_rows == 1 || num_rows * num_inputs <= 4096;
}

template <class RowOf>
const InputRows& Forward::fill(Worker& worker, const Block& block, const PackedMatrix& matrix, const RowOf& row_of) {
  const int64_t n = block.rows.size(), width = matrix.shape.num_inputs;
  const InputForm form = input_form(matrix.shape, n);
  const bool is_alone = block.is_own || is_cheap_to_fill(n, width);
  InputBuffer& buffer = is_alone ? worker.inputs.at(form, width) : shared_inputs_.at(form, width);
  if (is_alone) buffer.resize(form, n, width);
  const Range mine = is_alone ? Range{0, n} : share(n, worker.thread, worker.size);
  for (int64_t i = mine.begin; i < mine.end; ++i) buffer.fill_row(i, row_of(block.rows.begin + i));
  mark(worker, Phase::kNorm);
  if (!is_alone) barrier(worker);
  return buffer.rows();
}

}  // namespace llmopt::decoder
