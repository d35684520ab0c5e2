// A mixture of experts: the router, tokens grouped by expert, the experts, and their weighted sum.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/decoder/forward.h"

namespace llmopt::decoder {
namespace {

constexpr int64_t kTaskPanels = 16;  // panels of an expert that a thread takes at a time

}  // namespace

void Forward::prepare_moe() {
  int64_t slots = 0, experts = 0, width = 0;
  for (const LayerSpec& layer : spec_.layers) {
    const MoeSpec& moe = layer.moe;
    if (moe.experts.empty()) continue;
    slots = std::max(slots, num_rows_ * moe.num_top);
    experts = std::max(experts, static_cast<int64_t>(moe.experts.size()));
    width = std::max(width, moe.experts[0].up.weight.shape.num_outputs / (moe.experts[0].is_gated ? 2 : 1));
    prepare_shared(moe.router.weight, num_rows_, shared_inputs_);
  }
  normed_.resize(num_rows_ * spec_.hidden_size);
  router_logits_.resize(num_rows_ * experts);
  top_experts_.resize(slots);
  top_weights_.resize(slots);
  top_slots_.resize(slots);
  slot_rows_.resize(slots);
  expert_begin_.resize(experts);
  expert_rows_.resize(experts);
  active_experts_.reserve(experts);
  expert_inputs_.resize(experts);
  expert_products_.resize(experts);
  expert_mlp_.resize(slots * width);
  expert_out_.resize(slots * spec_.hidden_size);
}

// Tasks of kTaskPanels panels of all experts that have tokens, in the order of the experts; free threads take the next.
template <class Compute>
void Forward::share_experts(std::atomic<int64_t>& next, int64_t num_panels, const Compute& compute) {
  const int64_t per_expert = (num_panels + kTaskPanels - 1) / kTaskPanels;
  const int64_t total = per_expert * static_cast<int64_t>(active_experts_.size());
  for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < total;) {
    const int64_t panel = i % per_expert * kTaskPanels;
    compute(active_experts_[i / per_expert], panel, std::min(panel + kTaskPanels, num_panels));
  }
}

void Forward::moe(Worker& worker, const LayerSpec& layer) {
  const MoeSpec& moe = layer.moe;
  const int64_t hidden = spec_.hidden_size, num_experts = static_cast<int64_t>(moe.experts.size());
  const MatrixShape& up_shape = moe.experts[0].up.weight.shape;
  const MatrixShape& down_shape = moe.experts[0].down.weight.shape;
  const bool is_gated = moe.experts[0].is_gated;
  const int64_t width = up_shape.num_outputs / (is_gated ? 2 : 1);
  const Range rows = share(num_rows_, worker.thread, worker.size);

  InputBuffer& router_input = shared_inputs_.at(input_form(moe.router.weight.shape, num_rows_), hidden);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    float* normed = normed_.data() + row * hidden;
    const float* x = residual_.data() + row * hidden;
    if (norm(layer.before_mlp, x, hidden, normed) == x) std::copy_n(x, hidden, normed);
    router_input.fill_row(row, normed);
  }
  mark(worker, Phase::kNorm);
  barrier(worker);

  const Range panels = share(moe.router.weight.shape.num_panels(), worker.thread, worker.size);
  LinearOutput output;
  output.out = router_logits_.data();
  output.row_stride = num_experts;
  output.bias = moe.router.bias;
  linear(moe.router.weight, router_input.rows(), output, panels.begin, panels.end, worker.scratch);
  mark(worker, Phase::kRouter);
  barrier(worker);
  for (int64_t row = rows.begin; row < rows.end; ++row) choose_experts(moe, row);
  mark(worker, Phase::kRouter);
  barrier(worker);
  if (worker.thread == 0) group_by_expert(moe);
  mark(worker, Phase::kRouter);
  barrier(worker);

  // f(slot, expert) for this thread's share of all rows of all experts.
  const auto for_slots = [&](const auto& f) {
    const Range mine = share(num_slots_, worker.thread, worker.size);
    for (const int expert : active_experts_) {
      const int64_t begin = expert_begin_[expert], end = begin + expert_rows_[expert];
      for (int64_t slot = std::max(begin, mine.begin); slot < std::min(end, mine.end); ++slot) f(slot, expert);
    }
  };

  for_slots([&](int64_t slot, int expert) {
    expert_inputs_[expert].fill_row(slot - expert_begin_[expert], normed_.data() + slot_rows_[slot] * hidden);
  });
  mark(worker, Phase::kExperts);
  barrier(worker);
  share_experts(next_up_, up_shape.num_panels(), [&](int expert, int64_t begin, int64_t end) {
    const MlpSpec& spec = moe.experts[expert];
    LinearOutput product;
    product.kind = is_gated ? LinearOutput::Kind::kGated : LinearOutput::Kind::kStore;
    product.activation = spec.activation;
    product.bias = spec.up.bias;
    product.out = expert_mlp_.data() + expert_begin_[expert] * width;
    product.row_stride = width;
    linear(spec.up.weight, expert_inputs_[expert].rows(), product, begin, end, worker.scratch);
  });
  mark(worker, Phase::kExperts);
  barrier(worker);
  for_slots([&](int64_t slot, int expert) {
    expert_products_[expert].fill_row(slot - expert_begin_[expert], expert_mlp_.data() + slot * width);
  });
  mark(worker, Phase::kExperts);
  barrier(worker);
  share_experts(next_down_, down_shape.num_panels(), [&](int expert, int64_t begin, int64_t end) {
    const MlpSpec& spec = moe.experts[expert];
    LinearOutput product;
    product.bias = spec.down.bias;
    product.out = expert_out_.data() + expert_begin_[expert] * hidden;
    product.row_stride = hidden;
    linear(spec.down.weight, expert_products_[expert].rows(), product, begin, end, worker.scratch);
  });
  mark(worker, Phase::kExperts);
  barrier(worker);

  // Each row adds its experts in ascending order, whoever computed them.
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    float* sum = worker.row.data();
    std::fill_n(sum, hidden, 0.0f);
    for (int64_t i = row * moe.num_top; i < (row + 1) * moe.num_top; ++i) {
      kernels_.add(sum, hidden, expert_out_.data() + top_slots_[i] * hidden, top_weights_[i]);
    }
    sum = const_cast<float*>(norm(layer.after_mlp, sum, hidden, sum));
    kernels_.add(residual_.data() + row * hidden, hidden, sum, spec_.residual_scale);
  }
  mark(worker, Phase::kExperts);
  barrier(worker);
}

void Forward::choose_experts(const MoeSpec& moe, int64_t row) {
  const auto num_experts = static_cast<int>(moe.experts.size());
  float* weights = router_logits_.data() + row * num_experts;
  int32_t* chosen = top_experts_.data() + row * moe.num_top;
  // The best logits are the best probabilities. Of equal ones the first is taken; NaN goes before all numbers, so that
  // it reaches the output.
  for (int i = 0; i < moe.num_top; ++i) {
    int best = -1;
    for (int expert = 0; expert < num_experts; ++expert) {
      if (std::find(chosen, chosen + i, expert) != chosen + i) continue;
      if (best < 0 || weights[expert] > weights[best] || (std::isnan(weights[expert]) && !std::isnan(weights[best]))) {
        best = expert;
      }
    }
    chosen[i] = best;
  }
  const float max = weights[chosen[0]];
  std::sort(chosen, chosen + moe.num_top);
  const bool over_all = moe.kind == RouterKind::kSoftmaxThenTop && !moe.norm_top;
  float sum = 0;
  if (over_all) {
    for (int expert = 0; expert < num_experts; ++expert) sum += std::exp(weights[expert] - max);
  } else {
    for (int i = 0; i < moe.num_top; ++i) sum += std::exp(weights[chosen[i]] - max);
  }
  for (int i = 0; i < moe.num_top; ++i) {
    top_weights_[row * moe.num_top + i] = std::exp(weights[chosen[i]] - max) / sum;
  }
}

void Forward::group_by_expert(const MoeSpec& moe) {
  const int64_t num_experts = static_cast<int64_t>(moe.experts.size()), chosen = num_rows_ * moe.num_top;
  std::fill_n(expert_rows_.data(), num_experts, 0);
  for (int64_t i = 0; i < chosen; ++i) ++expert_rows_[top_experts_[i]];
  active_experts_.clear();
  num_slots_ = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    expert_begin_[expert] = num_slots_;
    const int64_t rows = expert_rows_[expert];
    if (rows == 0) continue;
    active_experts_.push_back(static_cast<int>(expert));
    num_slots_ += rows;
    const MatrixShape &up = moe.experts[expert].up.weight.shape, &down = moe.experts[expert].down.weight.shape;
    expert_inputs_[expert].resize(input_form(up, rows), rows, up.num_inputs);
    expert_products_[expert].resize(input_form(down, rows), rows, down.num_inputs);
    expert_rows_[expert] = 0;
  }
  for (int64_t i = 0; i < chosen; ++i) {
    const int32_t expert = top_experts_[i];
    const int64_t slot = expert_begin_[expert] + expert_rows_[expert]++;
    top_slots_[i] = slot;
    slot_rows_[slot] = i / moe.num_top;
  }
  next_up_.store(0, std::memory_order_relaxed);
  next_down_.store(0, std::memory_order_relaxed);
}

}  // namespace llmopt::decoder
