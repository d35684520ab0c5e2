// Attention of one layer: the projection to queries, keys and values, their norms and rotation, the write of keys and
// values to the cache, attention itself, and the output projection.
#include <algorithm>
#include <cstring>

#include "core/decoder/forward.h"

namespace llmopt::decoder {

AttentionArgs Forward::attention_args(int layer) const {
  const AttentionSpec& spec = spec_.layers[layer].attention;
  AttentionArgs args{};
  args.query = query_.data();
  args.query_token_stride = static_cast<int64_t>(spec.num_heads) * spec.head_dim;
  args.query_head_stride = spec.head_dim;
  args.num_tokens = num_rows_;
  args.num_heads = spec.num_heads;
  args.head_dim = spec.head_dim;
  args.out = attended_.data();
  args.scale = spec.scale;
  args.sliding_window = spec.sliding_window;
  args.softcap = spec.softcap;
  return args;
}

// Layers of the same kind share the split of their work and the blocks they look at.
void Forward::find_attention_kinds() {
  const auto is_same = [&](int a, int b) {
    const LayerCache &x = caches_[a], &y = caches_[b];
    const AttentionSpec &s = spec_.layers[a].attention, &t = spec_.layers[b].attention;
    return x.num_blocks == y.num_blocks && x.num_kv_heads == y.num_kv_heads && x.block_size == y.block_size &&
           x.head_dim == y.head_dim && x.dtype == y.dtype && x.is_quantized == y.is_quantized &&
           s.num_heads == t.num_heads && s.sliding_window == t.sliding_window;
  };
  for (int i = 0; i < static_cast<int>(caches_.size()); ++i) {
    if (std::none_of(attention_kinds_.begin(), attention_kinds_.end(), [&](int j) { return is_same(i, j); })) {
      attention_kinds_.push_back(i);
    }
  }
}

// Splitting the work looks at all blocks.
void Forward::check_attention(StepPlan& plan, int64_t num_tokens) {
  for (const int layer : attention_kinds_) {
    AttentionArgs args = attention_args(layer);
    args.num_tokens = num_tokens;
    estimate_attention_ns(args, caches_[layer], plan);
  }
}

void Forward::prepare_attention() {
  size_t bytes = 0;
  for (size_t i = 0; i < caches_.size(); ++i) {
    const AttentionSpec& spec = spec_.layers[i].attention;
    bytes = std::max(bytes, static_cast<size_t>(spec.num_heads) * spec.head_dim * item_size(caches_[i].dtype));
  }
  query_.resize(num_rows_ * static_cast<int64_t>(bytes));
  attended_.resize(num_rows_ * static_cast<int64_t>(bytes));
}

void Forward::project_qkv(Worker& worker, const Block& block, int layer) {
  const LayerSpec& spec = spec_.layers[layer];
  const int64_t hidden = spec_.hidden_size, rows = block.rows.size();
  const bool reads_token = layer == 0 && is_split();
  const InputRows& input = fill(worker, block, spec.attention.qkv.weight, [&](int64_t row) {
    if (reads_token) return split_input(worker, row);
    return norm(spec.before_attention, residual_.data() + row * hidden, hidden, worker.row.data());
  });
  const int64_t width = spec.attention.qkv.weight.shape.num_outputs;
  float* qkv = block.is_own ? worker.qkv.resize(rows * width) : qkv_.data();
  LinearOutput output;
  output.out = qkv;
  output.row_stride = width;
  multiply(worker, block, spec.attention.qkv, input, output, Phase::kQkv, &spec.attention.output.weight);

  const int units = num_units(spec.attention);
  const Range mine = share(rows * units, block.part, block.parts);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t row = i / units;
    rotate_and_store(qkv + row * width, block.rows.begin + row, static_cast<int>(i % units), layer);
  }
  mark(worker, Phase::kRope);
}

// A unit is a head, or where a norm spans the heads: all queries, all keys, all values.
int Forward::num_units(const AttentionSpec& spec) {
  return spec.norm_spans_heads ? 3 : spec.num_heads + 2 * spec.num_kv_heads;
}

void Forward::rotate_and_store(float* qkv, int64_t row, int unit, int layer) const {
  const AttentionSpec& spec = spec_.layers[layer].attention;
  if (!spec.norm_spans_heads) {
    const bool is_query = unit < spec.num_heads, is_key = !is_query && unit < spec.num_heads + spec.num_kv_heads;
    float* head = qkv + static_cast<int64_t>(unit) * spec.head_dim;
    if (is_query) norm(spec.q_norm, head, spec.head_dim, head);
    if (is_key) norm(spec.k_norm, head, spec.head_dim, head);
    rotate_and_store_head(head, row, unit, layer);
    return;
  }
  const int first[] = {0, spec.num_heads, spec.num_heads + spec.num_kv_heads, spec.num_heads + 2 * spec.num_kv_heads};
  float* heads = qkv + static_cast<int64_t>(first[unit]) * spec.head_dim;
  const int64_t width = static_cast<int64_t>(first[unit + 1] - first[unit]) * spec.head_dim;
  if (unit == 0) norm(spec.q_norm, heads, width, heads);
  if (unit == 1) norm(spec.k_norm, heads, width, heads);
  for (int head = first[unit]; head < first[unit + 1]; ++head) {
    rotate_and_store_head(qkv + static_cast<int64_t>(head) * spec.head_dim, row, head, layer);
  }
}

// head counts over queries, keys and values.
void Forward::rotate_and_store_head(float* values, int64_t row, int head, int layer) const {
  const AttentionSpec& spec = spec_.layers[layer].attention;
  const LayerCache& cache = caches_[layer];
  const int64_t dim = spec.head_dim;
  const auto size = static_cast<int64_t>(item_size(cache.dtype));
  const bool is_query = head < spec.num_heads, is_value = head >= spec.num_heads + spec.num_kv_heads;
  if (spec.rope >= 0 && !is_value) {
    const RopeTable& rope = spec_.ropes[spec.rope];
    const int64_t half = rope.rotary_dim / 2, at = inputs_.positions[row] * half;
    (rope.is_interleaved ? kernels_.rotate_interleaved : kernels_.rotate)(values, half, rope.cos + at, rope.sin + at);
  }
  if (cache.is_quantized && !is_value) attention_kernels_.rotate_row_f32(values, spec.head_dim, values);
  std::byte* to = nullptr;
  if (is_query) {
    to = query_.data() + (row * spec.num_heads + head) * dim * size;
  } else {
    const auto slots = plan_->inputs().slot_mapping;
    if (row >= static_cast<int64_t>(slots.size()) || slots[row] < 0) return;  // not stored
    const int64_t block = slots[row] / cache.block_size, offset = slots[row] % cache.block_size;
    const int64_t kv_head = (head - spec.num_heads) % spec.num_kv_heads;
    to = static_cast<std::byte*>(is_value ? cache.value : cache.key) +
         ((block * spec.num_kv_heads + kv_head) * cache.block_size + offset) * cache.row_bytes(spec.head_dim);
    if (cache.is_quantized) {
      attention_kernels_.quantize_row_f32(values, spec.head_dim, reinterpret_cast<int8_t*>(to));
      return;
    }
  }
  if (cache.dtype == DType::kFloat32) {
    std::memcpy(to, values, dim * sizeof(float));
  } else {
    kernels_.to_bfloat16(values, dim, reinterpret_cast<uint16_t*>(to));
  }
}

// Needs the work of the layers before to be over; attend() needs a barrier behind it.
void Forward::start_attention(const Worker& worker, int layer) {
  if (worker.thread == 0) attention_.emplace(attention_args(layer), caches_[layer], *plan_);
}

void Forward::attend(Worker& worker) {
  attention_->run();
  mark(worker, Phase::kAttention);
}

void Forward::project_output(Worker& worker, const Block& block, int layer) {
  const LayerSpec& spec = spec_.layers[layer];
  const AttentionSpec& attention = spec.attention;
  const int64_t width = static_cast<int64_t>(attention.num_heads) * attention.head_dim;
  const InputRows& input = fill(worker, block, attention.output.weight, [&](int64_t row) -> const float* {
    if (caches_[layer].dtype == DType::kFloat32) {
      return reinterpret_cast<const float*>(attended_.data()) + row * width;
    }
    kernels_.from_bfloat16(reinterpret_cast<const uint16_t*>(attended_.data()) + row * width, width, worker.row.data());
    return worker.row.data();
  });
  const PackedMatrix* next = spec.moe.experts.empty() ? &spec.mlp.up.weight : nullptr;
  multiply_into_residual(worker, block, attention.output, input, spec.after_attention, Phase::kOutput, next);
}

}  // namespace llmopt::decoder
