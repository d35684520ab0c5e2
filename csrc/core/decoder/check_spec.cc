#include "core/decoder/check_spec.h"

#include <stdexcept>
#include <string>

namespace llmopt::decoder {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

void check(bool fits, const std::string& where, const std::string& message) {
  if (!fits) refuse(where + ": " + message);
}

void check_matrix(const PackedMatrix& matrix, int64_t num_outputs, int64_t num_inputs, const std::string& where) {
  const MatrixShape& shape = matrix.shape;
  check(shape.num_outputs == num_outputs && shape.num_inputs == num_inputs, where,
        "the matrix is [" + std::to_string(shape.num_outputs) + ", " + std::to_string(shape.num_inputs) +
            "], it must be [" + std::to_string(num_outputs) + ", " + std::to_string(num_inputs) + "].");
  check(matrix.data != nullptr && reinterpret_cast<uintptr_t>(matrix.data) % 64 == 0, where,
        "the matrix has no memory, or memory that is not aligned to 64 bytes.");
  input_form(shape, 1);  // throws where no kernel reads this format
}

void check_norm(const NormSpec& norm, const std::string& where) {
  check(norm.kind == NormKind::kNone || norm.epsilon >= 0, where, "epsilon is negative.");
}

void check_mlp(const MlpSpec& mlp, int64_t hidden, const std::string& where) {
  const int64_t outputs = mlp.up.weight.shape.num_outputs, inner = mlp.down.weight.shape.num_inputs;
  check_matrix(mlp.up.weight, outputs, hidden, where + ".up");
  check_matrix(mlp.down.weight, hidden, inner, where + ".down");
  if (!mlp.is_gated) {
    check(outputs == inner, where,
          "up has " + std::to_string(outputs) + " outputs, down has " + std::to_string(inner) + " inputs.");
    return;
  }
  const int64_t padded = (inner + kPanelWidth - 1) / kPanelWidth * kPanelWidth;
  check(outputs == 2 * padded, where,
        "up has " + std::to_string(outputs) + " outputs; panels of gate and up for the " + std::to_string(inner) +
            " inputs of down are " + std::to_string(2 * padded) + ".");
}

void check_attention(const AttentionSpec& attention, const DecoderSpec& spec, int64_t num_inputs,
                     const LayerCache& cache, const std::string& where) {
  const int64_t heads = attention.num_heads, kv_heads = attention.num_kv_heads, dim = attention.head_dim;
  check(heads > 0 && kv_heads > 0 && dim > 0 && heads % kv_heads == 0, where,
        std::to_string(heads) + " query heads and " + std::to_string(kv_heads) + " key heads of " +
            std::to_string(dim) + " values: all must be positive, and the first a multiple of the second.");
  check(cache.num_kv_heads == kv_heads && cache.head_dim == dim && cache.head_dim_v == dim, where,
        "the cache has " + std::to_string(cache.num_kv_heads) + " heads of " + std::to_string(cache.head_dim) +
            " and " + std::to_string(cache.head_dim_v) + " values, the layer has " + std::to_string(kv_heads) + " of " +
            std::to_string(dim) + ".");
  check(cache.key && cache.value && cache.num_blocks > 0 && cache.block_size > 0, where, "the cache is empty.");
  check_matrix(attention.qkv.weight, (heads + 2 * kv_heads) * dim, num_inputs, where + ".qkv");
  check_matrix(attention.output.weight, spec.hidden_size, heads * dim, where + ".output");
  check_norm(attention.q_norm, where + ".q_norm");
  check_norm(attention.k_norm, where + ".k_norm");
  check(attention.scale >= 0 && attention.softcap >= 0 && attention.sliding_window >= 0, where,
        "scale, softcap and sliding_window must not be negative.");
  const int rope = attention.rope, num_ropes = static_cast<int>(spec.ropes.size());
  check(rope >= -1 && rope < num_ropes, where,
        "rope " + std::to_string(rope) + " of " + std::to_string(num_ropes) + " tables.");
  if (rope < 0) return;
  const RopeTable& table = spec.ropes[rope];
  check(table.cos && table.sin && table.num_positions > 0 && table.rotary_dim > 0 && table.rotary_dim % 2 == 0 &&
            table.rotary_dim <= dim,
        where,
        "a table of " + std::to_string(table.num_positions) + " positions and rotary_dim " +
            std::to_string(table.rotary_dim) + " for heads of " + std::to_string(dim) + ".");
}

void check_moe(const MoeSpec& moe, const DecoderSpec& spec, const std::string& where) {
  const auto num_experts = static_cast<int>(moe.experts.size());
  check(moe.num_top > 0 && moe.num_top <= num_experts, where,
        "the top " + std::to_string(moe.num_top) + " of " + std::to_string(num_experts) + " experts.");
  check_matrix(moe.router.weight, num_experts, spec.hidden_size, where + ".router");
  const WeightFormat format = moe.router.weight.shape.format;
  check(format == WeightFormat::kFloat32 || format == WeightFormat::kBFloat16, where,
        std::string("the router is ") + name(format) + ", it must be float32 or bfloat16.");
  for (int i = 0; i < num_experts; ++i) {
    const MlpSpec &first = moe.experts[0], &expert = moe.experts[i];
    const std::string expert_name = where + ".experts[" + std::to_string(i) + "]";
    check_mlp(expert, spec.hidden_size, expert_name);
    check(expert.up.weight.shape == first.up.weight.shape && expert.down.weight.shape == first.down.weight.shape &&
              expert.is_gated == first.is_gated,
          expert_name, "it has another shape or format than the first expert.");
  }
}

void check_front(const DraftFront& front, int64_t hidden) {
  if (front.kind == DraftFront::Kind::kNone) return;
  const int64_t width = front.fc.weight.shape.num_inputs, parts = static_cast<int64_t>(front.part_norms.size());
  const bool is_joined = front.kind == DraftFront::Kind::kJoin;
  check_matrix(front.fc.weight, hidden, is_joined ? 2 * hidden : width, "draft.fc");
  check(width > 0, "draft.fc", "it has no inputs.");
  check(parts == 0 || (!is_joined && width % parts == 0), "draft.part_norms",
        std::to_string(parts) + " norms for parts of " + std::to_string(width) + " features.");
  check_norm(front.token_norm, "draft.token_norm");
  check_norm(front.feature_norm, "draft.feature_norm");
  for (const NormSpec& norm : front.part_norms) check_norm(norm, "draft.part_norms");
}

}  // namespace

void check_spec(const DecoderSpec& spec, const std::vector<LayerCache>& caches) {
  check(spec.hidden_size > 0 && spec.vocab_size > 0 && !spec.layers.empty(), "the decoder",
        "hidden_size " + std::to_string(spec.hidden_size) + ", vocab_size " + std::to_string(spec.vocab_size) + ", " +
            std::to_string(spec.layers.size()) + " layers: all must be positive.");
  check(caches.size() == spec.layers.size(), "the decoder",
        std::to_string(spec.layers.size()) + " layers and " + std::to_string(caches.size()) + " caches.");
  check_matrix(spec.embedding, spec.vocab_size, spec.hidden_size, "embedding");
  check_matrix(spec.head.weight, spec.num_logits(), spec.hidden_size, "head");
  check_front(spec.draft, spec.hidden_size);
  check(!spec.position_embedding || spec.num_positions > 0, "position_embedding", "it has no positions.");
  check(spec.logit_softcap >= 0, "logit_softcap", "it is negative.");
  for (size_t i = 0; i < spec.hidden_layers.size(); ++i) {
    const int layer = spec.hidden_layers[i];
    check(layer > (i > 0 ? spec.hidden_layers[i - 1] : -1) && layer <= static_cast<int>(spec.layers.size()),
          "hidden_layers",
          "it holds " + std::to_string(layer) + "; layers must rise, from 0 to the number of layers, " +
              std::to_string(spec.layers.size()) + ".");
  }
  check_norm(spec.embedding_norm, "embedding_norm");
  check_norm(spec.final_norm, "final_norm");
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const LayerSpec& layer = spec.layers[i];
    const std::string where = "layers[" + std::to_string(i) + "]";
    check_norm(layer.before_attention, where + ".before_attention");
    check_norm(layer.after_attention, where + ".after_attention");
    check_norm(layer.before_mlp, where + ".before_mlp");
    check_norm(layer.after_mlp, where + ".after_mlp");
    const bool is_split = i == 0 && spec.draft.kind == DraftFront::Kind::kSplit;
    check_attention(layer.attention, spec, (is_split ? 2 : 1) * spec.hidden_size, caches[i], where + ".attention");
    if (layer.moe.experts.empty()) {
      check_mlp(layer.mlp, spec.hidden_size, where + ".mlp");
    } else {
      check_moe(layer.moe, spec, where + ".moe");
    }
  }
}

}  // namespace llmopt::decoder
