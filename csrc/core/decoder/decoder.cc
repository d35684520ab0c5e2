// The decoder as others see it: what is checked before a step, and what is known before the first.
#include "llmopt/decoder.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/decoder/check_spec.h"
#include "core/decoder/forward.h"

namespace llmopt {
namespace decoder {

Forward::Forward(DecoderSpec spec, std::vector<LayerCache> caches, std::shared_ptr<ThreadTeam> team)
    : spec_(std::move(spec)),
      caches_(std::move(caches)),
      team_(std::move(team)),
      kernels_(row_kernels(selected_isa())),
      attention_kernels_(attention::kernels(selected_isa())),
      num_positions_(spec_.position_embedding ? spec_.num_positions : std::numeric_limits<int64_t>::max()),
      num_slots_of_cache_(std::numeric_limits<int64_t>::max()) {
  if (!team_) throw std::invalid_argument("a decoder needs a team of threads.");
  check_spec(spec_, caches_);
  find_attention_kinds();
  max_width_ = spec_.hidden_size;
  if (spec_.draft.kind != DraftFront::Kind::kNone) {
    max_width_ = std::max(2 * spec_.hidden_size, spec_.draft.fc.weight.shape.num_inputs);
  }
  for (size_t i = 0; i < spec_.layers.size(); ++i) {
    const LayerSpec& layer = spec_.layers[i];
    const AttentionSpec& attention = layer.attention;
    max_width_ = std::max(max_width_, static_cast<int64_t>(attention.num_heads) * attention.head_dim);
    max_qkv_ = std::max(max_qkv_, attention.qkv.weight.shape.num_outputs);
    if (attention.rope >= 0) num_positions_ = std::min(num_positions_, spec_.ropes[attention.rope].num_positions);
    has_after_norms_ |= layer.after_attention.kind != NormKind::kNone;
    if (layer.moe.experts.empty()) {
      has_mlp_ = true;
      has_after_norms_ |= layer.after_mlp.kind != NormKind::kNone;
      max_mlp_ = std::max(max_mlp_, layer.mlp.up.weight.shape.num_outputs / (layer.mlp.is_gated ? 2 : 1));
    } else {
      has_experts_ = true;
    }
    num_slots_of_cache_ = std::min(num_slots_of_cache_, caches_[i].num_blocks * caches_[i].block_size);
  }
  for (int thread = 0; thread < team_->size(); ++thread) {
    workers_.push_back(std::make_unique<Worker>());
    workers_.back()->thread = thread;
    workers_.back()->size = team_->size();
  }
}

void Forward::check(const DecoderInputs& inputs, StepPlan& plan) {
  const auto num_tokens = static_cast<int64_t>(inputs.token_ids.size());
  if (num_tokens != plan.num_tokens() || inputs.positions.size() != inputs.token_ids.size()) {
    throw std::invalid_argument(std::to_string(num_tokens) + " token ids and " +
                                std::to_string(inputs.positions.size()) + " positions, but the plan has " +
                                std::to_string(plan.num_tokens()) + " tokens.");
  }
  for (int64_t i = 0; i < num_tokens; ++i) {
    if (inputs.token_ids[i] < 0 || inputs.token_ids[i] >= spec_.vocab_size) {
      throw std::out_of_range("token_ids[" + std::to_string(i) + "] is " + std::to_string(inputs.token_ids[i]) +
                              ", the vocabulary has ids 0 to " + std::to_string(spec_.vocab_size - 1) + ".");
    }
    if (inputs.positions[i] < 0 || inputs.positions[i] >= num_positions_) {
      throw std::out_of_range("positions[" + std::to_string(i) + "] is " + std::to_string(inputs.positions[i]) +
                              ", the model has positions 0 to " + std::to_string(num_positions_ - 1) + ".");
    }
  }
  int64_t last = -1;
  for (const int64_t index : inputs.logits_indices) {
    if (index <= last || index >= num_tokens) {
      throw std::out_of_range("logits_indices holds " + std::to_string(index) + " after " + std::to_string(last) +
                              "; they must rise and be below the number of tokens, " + std::to_string(num_tokens) +
                              ".");
    }
    last = index;
  }
  const bool drafts = spec_.draft.kind != DraftFront::Kind::kNone;
  if (num_tokens > 0 && (inputs.features != nullptr) + (inputs.states != nullptr) != (drafts ? 1 : 0)) {
    throw std::invalid_argument(drafts ? "a decoder that drafts reads features or states, one of them."
                                       : "features and states belong to a decoder that drafts.");
  }
  if (inputs.top < 0 || inputs.top > spec_.num_logits()) {
    throw std::invalid_argument("the best " + std::to_string(inputs.top) + " of " + std::to_string(spec_.num_logits()) +
                                " tokens.");
  }
  const auto slots = plan.inputs().slot_mapping;
  if (static_cast<int64_t>(slots.size()) > num_tokens) {
    throw std::invalid_argument("slot_mapping has " + std::to_string(slots.size()) + " slots, there are " +
                                std::to_string(num_tokens) + " tokens.");
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] >= num_slots_of_cache_) {
      throw std::out_of_range("slot_mapping[" + std::to_string(i) + "] is " + std::to_string(slots[i]) +
                              ", the cache has slots 0 to " + std::to_string(num_slots_of_cache_ - 1) + ".");
    }
  }
  check_attention(plan, num_tokens);
}

}  // namespace decoder

class Decoder::Impl : public decoder::Forward {
 public:
  using Forward::Forward;
};

Decoder::Decoder(DecoderSpec spec, std::vector<LayerCache> caches, std::shared_ptr<ThreadTeam> team)
    : impl_(std::make_unique<Impl>(std::move(spec), std::move(caches), std::move(team))) {}

Decoder::~Decoder() = default;

void Decoder::step(const DecoderInputs& inputs, StepPlan& plan) { impl_->step(inputs, plan); }

const DecoderSpec& Decoder::spec() const { return impl_->spec(); }

void Decoder::set_profiling(bool on) { impl_->clock().switch_on(on); }

bool Decoder::is_profiling() const { return impl_->clock().is_on(); }

std::vector<std::pair<const char*, double>> Decoder::profile() const {
  std::vector<std::pair<const char*, double>> times;
  for (int i = 0; i < static_cast<int>(decoder::Phase::kCount); ++i) {
    const auto phase = static_cast<decoder::Phase>(i);
    const double seconds = impl_->clock().seconds(phase);
    if (seconds > 0) times.emplace_back(decoder::name(phase), seconds);
  }
  return times;
}

}  // namespace llmopt
