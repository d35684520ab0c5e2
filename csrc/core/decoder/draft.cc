// What a decoder that drafts has beside the others: a front that reads hidden states, and an end that chooses the best
// few tokens of each row.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/decoder/forward.h"

namespace llmopt::decoder {

void Forward::draft_front(Worker& worker, const Block& block) {
  const DraftFront& front = spec_.draft;
  const int64_t hidden = spec_.hidden_size;
  const Range mine = share(block.rows.size(), block.part, block.parts);
  float* x = residual_.data() + block.rows.begin * hidden;
  if (is_split() && inputs_.states) {
    std::memcpy(x + mine.begin * hidden, inputs_.states + (block.rows.begin + mine.begin) * hidden,
                mine.size() * hidden * sizeof(float));
    mark(worker, Phase::kEmbedding);
    if (!block.is_own && !front.norm_residual) barrier(worker);
  } else {
    const InputRows& input = fill(worker, block, front.fc.weight, [&](int64_t row) {
      return is_split() ? normed_features(worker, row) : join_token(worker, row);
    });
    LinearOutput output;
    output.out = x;
    output.row_stride = hidden;
    multiply(worker, block, front.fc, input, output, Phase::kEmbedding, &spec_.layers[0].attention.qkv.weight);
  }
  if (!is_split() || !front.norm_residual) return;
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    norm(spec_.layers[0].before_attention, x + i * hidden, hidden, x + i * hidden);
  }
  mark(worker, Phase::kNorm);
  if (!block.is_own) barrier(worker);
}

// [token | feature or state] of a row, in the worker's row.
const float* Forward::join_token(Worker& worker, int64_t row) const {
  const int64_t hidden = spec_.hidden_size;
  float* out = worker.row.data();
  embed_token(row, out);
  norm(spec_.draft.token_norm, out, hidden, out);
  const float* given = (inputs_.features ? inputs_.features : inputs_.states) + row * hidden;
  const float* feature = norm(spec_.draft.feature_norm, given, hidden, out + hidden);
  if (feature != out + hidden) std::memcpy(out + hidden, feature, hidden * sizeof(float));
  return out;
}

const float* Forward::normed_features(Worker& worker, int64_t row) const {
  const DraftFront& front = spec_.draft;
  const int64_t width = front.fc.weight.shape.num_inputs;
  const float* features = inputs_.features + row * width;
  if (!front.part_norms.empty()) {
    const int64_t part = width / static_cast<int64_t>(front.part_norms.size());
    float* out = worker.row.data();
    for (const NormSpec& spec : front.part_norms) {
      if (norm(spec, features, part, out) != out) std::memcpy(out, features, part * sizeof(float));
      features += part;
      out += part;
    }
    features = worker.row.data();
  }
  return norm(front.feature_norm, features, width, worker.row.data());
}

// [token | x] of a row as the first layer reads it, in the worker's row.
const float* Forward::split_input(Worker& worker, int64_t row) const {
  const int64_t hidden = spec_.hidden_size;
  float* out = worker.row.data();
  embed_token(row, out);
  norm(spec_.draft.token_norm, out, hidden, out);
  const float* x = residual_.data() + row * hidden;
  const float* normed = spec_.draft.norm_residual ? x : norm(spec_.layers[0].before_attention, x, hidden, out + hidden);
  if (normed != out + hidden) std::memcpy(out + hidden, normed, hidden * sizeof(float));
  return out;
}

void Forward::choose_top(Worker& worker) {
  barrier(worker);
  const int64_t vocab = spec_.num_logits(), top = inputs_.top;
  const Range mine = share(static_cast<int64_t>(inputs_.logits_indices.size()), worker.thread, worker.size);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const float* logits = inputs_.logits + i * vocab;
    float* values = inputs_.top_log_probs + i * top;
    kernels_.top(logits, vocab, static_cast<int>(top), inputs_.top_ids + i * top, values);
    const float best = values[0], total = best + std::log(kernels_.sum_exp(logits, vocab, best));
    for (int64_t k = 0; k < top; ++k) values[k] -= total;
  }
  mark(worker, Phase::kHead);
}

}  // namespace llmopt::decoder
