// One step: the embedding, the layers and the head on every thread of the team.
#include <algorithm>
#include <cstring>

#include "core/decoder/forward.h"

namespace llmopt::decoder {
namespace {

// From so many rows per thread on each takes its own rows through the matrices.
constexpr int64_t kOwnRows = 128;
// Rows of a block together should stay in the second-level cache, next to the panels that stream by.
constexpr int64_t kBlockBytes = 1 << 20;
constexpr int64_t kMinBlockRows = 128;
// With more rows than this the matrices are not waiting for memory, and there is nothing to fetch ahead.
constexpr int64_t kPrefetchRows = 64;
// Of the next matrix, while a thread waits for the others; an eighth of a second-level cache.
constexpr int64_t kAheadBytes = 256 << 10;

}  // namespace

void Forward::step(const DecoderInputs& inputs, StepPlan& plan) {
  check(inputs, plan);
  clock_.start();
  inputs_ = inputs;
  plan_ = &plan;
  num_rows_ = static_cast<int64_t>(inputs.token_ids.size());
  if (num_rows_ == 0) return;
  prepare();
  if (clock_.is_on()) clock_.mark(Phase::kPrepare);
  team_->run([this](int thread, int) { run(*workers_[thread]); });
  if (clock_.is_on()) clock_.mark(Phase::kWait);
  finish_head();
}

// Everything that several threads write is made here, by the caller alone.
void Forward::prepare() {
  const int64_t rows = num_rows_;
  has_own_blocks_ = rows >= kOwnRows * team_->size();
  residual_.resize(rows * spec_.hidden_size);
  if (has_after_norms_) branch_.resize(rows * spec_.hidden_size);
  prepare_attention();
  if (has_experts_) prepare_moe();
  prepare_head();
  if (has_own_blocks_) return;
  if (spec_.draft.kind != DraftFront::Kind::kNone) prepare_shared(spec_.draft.fc.weight, rows, shared_inputs_);
  qkv_.resize(rows * max_qkv_);
  if (has_mlp_) mlp_.resize(rows * max_mlp_);
  for (const LayerSpec& layer : spec_.layers) {
    prepare_shared(layer.attention.qkv.weight, rows, shared_inputs_);
    prepare_shared(layer.attention.output.weight, rows, shared_inputs_);
    if (!layer.moe.experts.empty()) continue;
    prepare_shared(layer.mlp.up.weight, rows, shared_inputs_);
    prepare_shared(layer.mlp.down.weight, rows, shared_inputs_);
    if (is_dense(input_form(layer.mlp.down.weight.shape, rows))) {
      prepare_shared(layer.mlp.down.weight, rows, shared_products_);
    }
  }
}

void Forward::prepare_shared(const PackedMatrix& matrix, int64_t num_rows, InputSet& set) {
  const InputForm form = input_form(matrix.shape, num_rows);
  InputBuffer& buffer = set.at(form, matrix.shape.num_inputs);
  if (buffer.rows().num_rows != num_rows) buffer.resize(form, num_rows, matrix.shape.num_inputs);
}

void Forward::divide(Worker& worker) const {
  worker.blocks.clear();
  if (!has_own_blocks_) {
    worker.blocks.push_back({{0, num_rows_}, worker.thread, worker.size, false});
    return;
  }
  const Range mine = share(num_rows_, worker.thread, worker.size);
  const int64_t fitting = kBlockBytes / (2 * std::max(max_width_, max_mlp_));
  const int64_t wanted = std::max(kMinBlockRows, fitting / 32 * 32);
  const int64_t count = std::max<int64_t>(1, (mine.size() + wanted / 2) / wanted);
  for (int64_t i = 0; i < count; ++i) {
    const Range part = share(mine.size(), i, count, 16);
    worker.blocks.push_back({{mine.begin + part.begin, mine.begin + part.end}, 0, 1, true});
  }
}

void Forward::run(Worker& worker) {
  const TileScope tiles;
  divide(worker);
  worker.ahead = {};
  worker.row.resize(max_width_);
  for (const Block& block : worker.blocks) {
    if (spec_.draft.kind == DraftFront::Kind::kNone) {
      embed(worker, block);
    } else {
      draft_front(worker, block);
    }
  }
  const int num_layers = static_cast<int>(spec_.layers.size());
  const PackedMatrix* after_layers = inputs_.logits_indices.empty() ? nullptr : &spec_.head.weight;
  for (int i = 0; i < num_layers; ++i) {
    const LayerSpec& layer = spec_.layers[i];
    const PackedMatrix* next = i + 1 < num_layers ? &spec_.layers[i + 1].attention.qkv.weight : after_layers;
    show_hidden(worker, i);
    for (const Block& block : worker.blocks) project_qkv(worker, block, i);
    start_attention(worker, i);
    barrier(worker);
    attend(worker);
    barrier(worker);
    const bool has_experts = !layer.moe.experts.empty();
    for (const Block& block : worker.blocks) {
      project_output(worker, block, i);
      if (!has_experts) mlp(worker, block, layer, next);
    }
    if (has_experts) {
      if (has_own_blocks_) barrier(worker);
      moe(worker, layer);
    }
  }
  show_hidden(worker, num_layers);
  if (has_own_blocks_) barrier(worker);
  head(worker);
}

const float* Forward::norm(const NormSpec& spec, const float* x, int64_t n, float* out) const {
  if (spec.kind == NormKind::kNone) return x;
  if (spec.kind == NormKind::kRms) {
    kernels_.rms_norm(x, n, spec.weight, spec.epsilon, out);
  } else {
    kernels_.layer_norm(x, n, spec.weight, spec.bias, spec.epsilon, out);
  }
  return out;
}

void Forward::embed_token(int64_t row, float* out) const {
  unpack_row(spec_.embedding, inputs_.token_ids[row], out);
  if (spec_.embedding_scale != 1) kernels_.scale(out, spec_.hidden_size, spec_.embedding_scale);
}

void Forward::embed(Worker& worker, const Block& block) {
  const int64_t hidden = spec_.hidden_size;
  const Range mine = share(block.rows.size(), block.part, block.parts);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t row = block.rows.begin + i;
    float* x = residual_.data() + row * hidden;
    embed_token(row, x);
    if (spec_.position_embedding) {
      kernels_.add(x, hidden, spec_.position_embedding + inputs_.positions[row] * hidden, 1);
    }
    norm(spec_.embedding_norm, x, hidden, x);
  }
  mark(worker, Phase::kEmbedding);
  if (!block.is_own) barrier(worker);
}

// Runs between the barrier behind the layer before and the next one, so nobody writes to the residual stream meanwhile.
void Forward::show_hidden(Worker& worker, int layer) {
  if (!inputs_.hidden) return;
  const auto place = std::ranges::find(spec_.hidden_layers, layer);
  if (place == spec_.hidden_layers.end()) return;
  const auto count = static_cast<int64_t>(spec_.hidden_layers.size()), at = place - spec_.hidden_layers.begin();
  const int64_t hidden = spec_.hidden_size;
  const bool is_last = layer == static_cast<int>(spec_.layers.size());
  for (const Block& block : worker.blocks) {
    const Range mine = share(block.rows.size(), block.part, block.parts);
    for (int64_t row = block.rows.begin + mine.begin; row < block.rows.begin + mine.end; ++row) {
      const float* x = residual_.data() + row * hidden;
      float* out = inputs_.hidden + (row * count + at) * hidden;
      if (is_last) x = norm(spec_.final_norm, x, hidden, out);
      if (x != out) std::memcpy(out, x, hidden * sizeof(float));
    }
  }
}

void Forward::multiply(Worker& worker, const Block& block, const LinearSpec& linear, const InputRows& input,
                       LinearOutput output, Phase phase, const PackedMatrix* next) {
  const int64_t unit = output.kind == LinearOutput::Kind::kGated ? 2 : 1;
  const Range panels = share(linear.weight.shape.num_panels(), block.part, block.parts, unit);
  output.bias = linear.bias;
  worker.ahead = {};
  llmopt::linear(linear.weight, input, output, panels.begin, panels.end, worker.scratch);
  if (next && block.rows.size() <= kPrefetchRows) {
    const Range ahead = share(next->shape.num_panels(), block.part, block.parts);
    if (ahead.size() > 0) {
      prefetch_panels(*next, ahead.begin, ahead.end);
      const int64_t bytes = std::min(kAheadBytes, ahead.size() * panel_bytes(next->shape));
      worker.ahead = {next->panel(ahead.begin), static_cast<size_t>(bytes)};
    }
  }
  mark(worker, phase);
  if (!block.is_own) barrier(worker);
}

void Forward::multiply_into_residual(Worker& worker, const Block& block, const LinearSpec& linear,
                                     const InputRows& input, const NormSpec& after, Phase phase,
                                     const PackedMatrix* next) {
  const int64_t hidden = spec_.hidden_size;
  LinearOutput output;
  output.row_stride = hidden;
  if (after.kind == NormKind::kNone) {
    output.kind = LinearOutput::Kind::kAdd;
    output.out = residual_.data() + block.rows.begin * hidden;
    output.scale = spec_.residual_scale;
    multiply(worker, block, linear, input, output, phase, next);
    return;
  }
  output.out = branch_.data() + block.rows.begin * hidden;
  multiply(worker, block, linear, input, output, phase, next);
  const Range mine = share(block.rows.size(), block.part, block.parts);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t at = (block.rows.begin + i) * hidden;
    const float* branch = norm(after, branch_.data() + at, hidden, worker.row.data());
    kernels_.add(residual_.data() + at, hidden, branch, spec_.residual_scale);
  }
  mark(worker, Phase::kNorm);
  if (!block.is_own) barrier(worker);
}

void Forward::mlp(Worker& worker, const Block& block, const LayerSpec& layer, const PackedMatrix* next) {
  const MlpSpec& spec = layer.mlp;
  const int64_t hidden = spec_.hidden_size, rows = block.rows.size();
  const InputRows& input = fill(worker, block, spec.up.weight, [&](int64_t row) {
    return norm(layer.before_mlp, residual_.data() + row * hidden, hidden, worker.row.data());
  });
  const int64_t width = spec.up.weight.shape.num_outputs / (spec.is_gated ? 2 : 1);
  const int64_t down_width = spec.down.weight.shape.num_inputs;
  LinearOutput output;
  output.kind = spec.is_gated ? LinearOutput::Kind::kGated : LinearOutput::Kind::kStore;
  output.activation = spec.activation;
  const InputForm form = input_form(spec.down.weight.shape, rows);
  if (!is_dense(form)) {
    float* out = block.is_own ? worker.mlp.resize(rows * width) : mlp_.data();
    output.out = out;
    output.row_stride = width;
    multiply(worker, block, spec.up, input, output, Phase::kUp, &spec.down.weight);
    const InputRows& product =
        fill(worker, block, spec.down.weight, [&](int64_t row) { return out + (row - block.rows.begin) * width; });
    multiply_into_residual(worker, block, spec.down, product, layer.after_mlp, Phase::kDown, next);
    return;
  }
  // The product is stored as `down` reads it. Only the padding of the rows is missing then.
  InputBuffer& buffer = (block.is_own ? worker.products : shared_products_).at(form, down_width);
  if (block.is_own) buffer.resize(form, rows, down_width);
  output.dtype = form == InputForm::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
  output.row_stride = buffer.rows().row_bytes / static_cast<int64_t>(item_size(output.dtype));
  output.out = writable(buffer);
  if (block.part == 0) clear_padding(buffer, width);
  multiply(worker, block, spec.up, input, output, Phase::kUp, &spec.down.weight);
  multiply_into_residual(worker, block, spec.down, buffer.rows(), layer.after_mlp, Phase::kDown, next);
}

}  // namespace llmopt::decoder
