// A decoder-only transformer as data: what each layer computes and where its weights lie.
//
// The residual stream and everything between matrices is float32. All vectors (norm weights, biases) are float32. The
// memory behind every pointer belongs to the caller and outlives the decoder.
#pragma once

#include <cstdint>
#include <vector>

#include "llmopt/linear.h"
#include "llmopt/packed_matrix.h"

namespace llmopt {

enum class NormKind : uint8_t { kNone, kRms, kLayer };

struct NormSpec {
  NormKind kind = NormKind::kNone;
  const float* weight = nullptr;  // null: ones. Gemma's 1 + w is added before it comes here
  const float* bias = nullptr;    // kLayer only, may be null
  float epsilon = 0;
};

struct LinearSpec {
  PackedMatrix weight;
  const float* bias = nullptr;  // [N] in the order of the packed columns
};

// cos and sin of every position. Rotates the first rotary_dim values of a head, pairing i with i + rotary_dim / 2.
struct RopeTable {
  const float* cos = nullptr;  // [num_positions, rotary_dim / 2], scaled by the attention factor of the RoPE type
  const float* sin = nullptr;
  int64_t num_positions = 0;
  int rotary_dim = 0;
  bool is_interleaved = false;  // pairs 2i with 2i + 1 instead
};

struct AttentionSpec {
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  LinearSpec qkv;  // columns: queries of all heads, keys, values
  LinearSpec output;
  NormSpec q_norm, k_norm;        // weight [head_dim], or [heads * head_dim] with norm_spans_heads
  bool norm_spans_heads = false;  // one norm over all heads (OLMo 2) instead of one per head (Qwen 3)
  int rope = -1;                  // index into DecoderSpec::ropes; -1: no rotation (SmolLM3's NoPE layers, GPT-2)
  float scale = 0;
  float softcap = 0;
  int sliding_window = 0;  // 0: all keys
};

struct MlpSpec {
  LinearSpec up;  // is_gated: gate and up in alternating panels of 16 columns (LinearOutput::kGated)
  LinearSpec down;
  Activation activation = Activation::kSilu;
  bool is_gated = true;
};

enum class RouterKind : uint8_t {
  kSoftmaxThenTop,  // softmax over all experts, take the top, renormalize if norm_top
  kTopThenSoftmax,  // same numbers as the above with norm_top; kept apart for models without it
};

struct MoeSpec {
  LinearSpec router;  // [num_experts, hidden] float32 or bfloat16
  RouterKind kind = RouterKind::kSoftmaxThenTop;
  int num_top = 0;
  bool norm_top = false;
  std::vector<MlpSpec> experts;  // empty: the layer has an ordinary MLP
};

struct LayerSpec {
  NormSpec before_attention, after_attention;  // x += norm_after(attention(norm_before(x))) * residual_scale
  NormSpec before_mlp, after_mlp;
  AttentionSpec attention;
  MlpSpec mlp;
  MoeSpec moe;
};

// The front of a decoder that drafts for another one: beside each token it reads hidden states of that one (features),
// or its own residual stream at an earlier token (a state).
//   kJoin   x = fc([token | feature or state])                                                        EAGLE-1, EAGLE-2
//   kSplit  x = fc(features), or the state as it is; the first layer's queries, keys and values read
//           [token | before_attention(x)]                                                             EAGLE-3
// where token is token_norm(embedding).
struct DraftFront {
  enum class Kind : uint8_t { kNone, kJoin, kSplit };
  Kind kind = Kind::kNone;
  LinearSpec fc;                     // kJoin: [hidden, 2 * hidden]; kSplit: [hidden, any width]
  NormSpec token_norm;               // perhaps none
  NormSpec feature_norm;             // kJoin: of the feature or state; kSplit: of all features
  std::vector<NormSpec> part_norms;  // kSplit: of each of as many equal parts of the features, before feature_norm
  bool norm_residual = false;        // kSplit: before_attention(x) takes the place of x in the residual stream
  bool shows_normed = false;         // states are shown behind the final norm
};

struct DecoderSpec {
  int64_t hidden_size = 0, vocab_size = 0;
  PackedMatrix embedding;  // [vocab, hidden]; the head's own matrix when they are tied
  float embedding_scale = 1;
  const float* position_embedding = nullptr;  // [num_positions, hidden] (GPT-2), or null
  int64_t num_positions = 0;                  // of position_embedding
  NormSpec embedding_norm;                    // kNone for the families we know
  std::vector<RopeTable> ropes;
  std::vector<LayerSpec> layers;
  float residual_scale = 1;  // of what is added to the residual stream (Granite)
  NormSpec final_norm;
  LinearSpec head;        // [vocab or head_size, hidden]
  float logit_scale = 1;  // logits = head(x) * logit_scale, then the cap
  float logit_softcap = 0;
  // Where a step shows the residual stream, ascending: i for what enters layer i, the number of layers for the output
  // of the final norm.
  std::vector<int> hidden_layers;
  DraftFront draft;       // kNone: an ordinary decoder
  int64_t head_size = 0;  // rows of the head when it does not have the whole vocabulary; 0: vocab_size

  int64_t num_logits() const { return head_size > 0 ? head_size : vocab_size; }
};

}  // namespace llmopt
