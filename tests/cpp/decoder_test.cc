// Whole forwards of tiny random models against a plain forward in double, with the instruction set that LLMOPT_ISA
// names. The reference reads the weights back from the packed matrices, so that only the arithmetic differs.
#include "llmopt/decoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "llmopt/argmax.h"
#include "llmopt/isa.h"

namespace llmopt {
namespace {

using Row = std::vector<double>;

enum class Rope { kNone, kHalf, kInterleaved, kPartial };

struct Options {
  std::string name = "llama";
  WeightFormat format = WeightFormat::kFloat32;
  DType cache = DType::kFloat32;
  int group_size = 0;
  int hidden = 48, heads = 4, kv_heads = 2, dim = 20, inner = 64, vocab = 77, layers = 2, block_size = 4;
  NormKind norm = NormKind::kRms;
  bool before_norms = true, after_norms = false, head_norms = false, spanning_norms = false, embedding_norm = false;
  Rope rope = Rope::kHalf;
  bool last_layer_without_rope = false, biases = false, learned_positions = false;
  bool gated = true;
  Activation activation = Activation::kSilu;
  int window_of_odd_layers = 0;
  float softcap = 0, logit_softcap = 0, embedding_scale = 1, residual_scale = 1, logit_scale = 1;
  int experts = 0, top = 2;
  bool norm_top = false;
  RouterKind router = RouterKind::kSoftmaxThenTop;
  int num_positions = 512;
};

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};

// A spec with its memory, and its cache.
class Model {
 public:
  explicit Model(Options options, uint32_t seed = 1) : o(std::move(options)), random_(seed) {
    spec.hidden_size = o.hidden;
    spec.vocab_size = o.vocab;
    spec.embedding = matrix(o.vocab, o.hidden, 1.0f);
    spec.embedding_scale = o.embedding_scale;
    if (o.learned_positions) {
      spec.position_embedding = vector(static_cast<int64_t>(o.num_positions) * o.hidden, 0, 0.3f);
      spec.num_positions = o.num_positions;
    }
    if (o.embedding_norm) spec.embedding_norm = norm(o.hidden);
    if (o.rope != Rope::kNone) {
      for (const float base : {100.0f, 1000.0f}) spec.ropes.push_back(rope_table(base));
    }
    for (int i = 0; i < o.layers; ++i) spec.layers.push_back(layer(i));
    spec.residual_scale = o.residual_scale;
    spec.final_norm = norm(o.hidden);
    spec.head = linear(o.vocab, o.hidden);
    spec.logit_scale = o.logit_scale;
    spec.logit_softcap = o.logit_softcap;
  }

  std::vector<LayerCache> make_caches(int64_t num_blocks) {
    caches.clear();
    const size_t bytes = num_blocks * o.kv_heads * o.block_size * o.dim * item_size(o.cache);
    for (int i = 0; i < 2 * o.layers; ++i) caches.emplace_back(bytes, 0xff);  // NaN in both types
    std::vector<LayerCache> made;
    for (int i = 0; i < o.layers; ++i) {
      made.push_back({caches[2 * i].data(), caches[2 * i + 1].data(), num_blocks, o.kv_heads, o.block_size, o.dim,
                      o.dim, o.cache});
    }
    return made;
  }

  Options o;
  DecoderSpec spec;
  std::vector<std::vector<unsigned char>> caches;

 private:
  float gauss(float mean, float deviation) { return std::normal_distribution<float>(mean, deviation)(random_); }

  const float* vector(int64_t n, float mean, float deviation) {
    std::vector<float>& values = vectors_.emplace_back(n);
    for (float& x : values) x = gauss(mean, deviation);
    return values.data();
  }

  NormSpec norm(int64_t n) {
    return {o.norm, vector(n, 1, 0.2f), o.norm == NormKind::kLayer ? vector(n, 0, 0.2f) : nullptr, 1e-5f};
  }

  PackedMatrix matrix(int64_t outputs, int64_t inputs, float size, bool is_router = false) {
    MatrixShape shape{o.format, outputs, inputs, 0, false};
    if (is_router) shape.format = WeightFormat::kFloat32;
    if (shape.format == WeightFormat::kInt8Group || shape.format == WeightFormat::kInt4Group) {
      shape.group_size = o.group_size;
    }
    std::byte* data = static_cast<std::byte*>(std::aligned_alloc(64, packed_bytes(shape)));
    packed_.emplace_back(data);
    std::vector<float> dense(outputs * inputs);
    for (float& x : dense) x = gauss(0, size);
    for (int64_t panel = 0; panel < shape.num_panels(); ++panel) {
      SourceRows rows;
      for (int64_t i = 0; i < kPanelWidth && panel * kPanelWidth + i < outputs; ++i) {
        rows.rows[i] = dense.data() + (panel * kPanelWidth + i) * inputs;
      }
      pack_panel(shape, rows, data + panel * panel_bytes(shape));
    }
    return {shape, data};
  }

  LinearSpec linear(int64_t outputs, int64_t inputs) {
    const float size = 1.0f / std::sqrt(static_cast<float>(inputs));
    return {matrix(outputs, inputs, size), o.biases ? vector(outputs, 0, 0.3f) : nullptr};
  }

  RopeTable rope_table(float base) {
    const int dim = o.rope == Rope::kPartial ? o.dim / 2 / 2 * 2 : o.dim;
    const int half = dim / 2;
    std::vector<float>&cos = vectors_.emplace_back(), &sin = vectors_.emplace_back();
    for (int p = 0; p < o.num_positions; ++p) {
      for (int i = 0; i < half; ++i) {
        const double angle = p * std::pow(base, -2.0 * i / dim);
        cos.push_back(static_cast<float>(std::cos(angle)));
        sin.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    return {cos.data(), sin.data(), o.num_positions, dim, o.rope == Rope::kInterleaved};
  }

  MlpSpec mlp() {
    const int64_t padded = (o.inner + kPanelWidth - 1) / kPanelWidth * kPanelWidth;
    MlpSpec made;
    made.up = linear(o.gated ? 2 * padded : o.inner, o.hidden);
    made.down = linear(o.hidden, o.inner);
    made.activation = o.activation;
    made.is_gated = o.gated;
    return made;
  }

  LayerSpec layer(int index) {
    LayerSpec made;
    if (o.before_norms) made.before_attention = norm(o.hidden), made.before_mlp = norm(o.hidden);
    if (o.after_norms) made.after_attention = norm(o.hidden), made.after_mlp = norm(o.hidden);
    AttentionSpec& attention = made.attention;
    attention.num_heads = o.heads;
    attention.num_kv_heads = o.kv_heads;
    attention.head_dim = o.dim;
    attention.qkv = linear((o.heads + 2 * o.kv_heads) * o.dim, o.hidden);
    attention.output = linear(o.hidden, o.heads * o.dim);
    if (o.head_norms) attention.q_norm = norm(o.dim), attention.k_norm = norm(o.dim);
    if (o.spanning_norms) {
      attention.q_norm = norm(o.heads * o.dim);
      attention.k_norm = norm(o.kv_heads * o.dim);
      attention.norm_spans_heads = true;
    }
    attention.rope = o.rope == Rope::kNone || (o.last_layer_without_rope && index == o.layers - 1) ? -1 : index % 2;
    attention.scale = 1.0f / std::sqrt(static_cast<float>(o.dim));
    attention.softcap = o.softcap;
    attention.sliding_window = index % 2 == 1 ? o.window_of_odd_layers : 0;
    if (o.experts == 0) {
      made.mlp = mlp();
      return made;
    }
    made.moe.router = {matrix(o.experts, o.hidden, 0.5f, true), o.biases ? vector(o.experts, 0, 0.1f) : nullptr};
    made.moe.kind = o.router;
    made.moe.num_top = o.top;
    made.moe.norm_top = o.norm_top;
    for (int i = 0; i < o.experts; ++i) made.moe.experts.push_back(mlp());
    return made;
  }

  std::mt19937 random_;
  std::deque<std::vector<float>> vectors_;
  std::deque<std::unique_ptr<std::byte, Free>> packed_;
};

// ---- The reference
// ---------------------------------------------------------------------------------------------------

Row unpacked(const PackedMatrix& matrix, int64_t row) {
  std::vector<float> values(matrix.shape.num_inputs);
  unpack_row(matrix, row, values.data());
  return {values.begin(), values.end()};
}

Row product(const LinearSpec& linear, const Row& x) {
  Row y(linear.weight.shape.num_outputs);
  for (size_t n = 0; n < y.size(); ++n) {
    const Row w = unpacked(linear.weight, static_cast<int64_t>(n));
    y[n] = std::inner_product(w.begin(), w.end(), x.begin(), 0.0) + (linear.bias ? linear.bias[n] : 0);
  }
  return y;
}

void apply_norm(const NormSpec& spec, double* x, int64_t n) {
  if (spec.kind == NormKind::kNone) return;
  const double mean = spec.kind == NormKind::kLayer ? std::accumulate(x, x + n, 0.0) / n : 0;
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const double factor = 1 / std::sqrt(squares / n + spec.epsilon);
  for (int64_t i = 0; i < n; ++i) {
    x[i] = (x[i] - mean) * factor * (spec.weight ? spec.weight[i] : 1) + (spec.bias ? spec.bias[i] : 0);
  }
}

Row normed(const NormSpec& spec, Row x) {
  apply_norm(spec, x.data(), static_cast<int64_t>(x.size()));
  return x;
}

double activated(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGelu:
      return x * 0.5 * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::kGeluTanh:
      return x * 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kReluSquared:
      return std::max(x, 0.0) * std::max(x, 0.0);
  }
  return x;
}

Row reference_mlp(const MlpSpec& mlp, const Row& x) {
  const Row up = product(mlp.up, x);
  Row inner(mlp.down.weight.shape.num_inputs);
  for (size_t i = 0; i < inner.size(); ++i) {
    const size_t gate = i / 16 * 32 + i % 16;
    inner[i] = mlp.is_gated ? activated(mlp.activation, up[gate]) * up[gate + 16] : activated(mlp.activation, up[i]);
  }
  return product(mlp.down, inner);
}

Row reference_moe(const MoeSpec& moe, const Row& x) {
  const Row logits = product(moe.router, x);
  std::vector<int> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  const bool over_all = moe.kind == RouterKind::kSoftmaxThenTop && !moe.norm_top;
  double sum = 0;
  for (size_t i = 0; i < (over_all ? order.size() : moe.num_top); ++i) sum += std::exp(logits[order[i]]);
  Row out(x.size());
  for (int i = 0; i < moe.num_top; ++i) {
    const Row y = reference_mlp(moe.experts[order[i]], x);
    for (size_t j = 0; j < y.size(); ++j) out[j] += y[j] * std::exp(logits[order[i]]) / sum;
  }
  return out;
}

void rotate(const RopeTable& rope, int64_t position, double* head) {
  const int half = rope.rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    const double c = rope.cos[position * half + i], s = rope.sin[position * half + i];
    double& a = head[rope.is_interleaved ? 2 * i : i];
    double& b = head[rope.is_interleaved ? 2 * i + 1 : i + half];
    const double rotated = a * c - b * s;
    b = b * c + a * s;
    a = rotated;
  }
}

Row reference_attention(const AttentionSpec& spec, const std::vector<Row>& keys, const std::vector<Row>& values,
                        const Row& query) {
  const int last = static_cast<int>(keys.size()) - 1, dim = spec.head_dim;
  const int first = spec.sliding_window ? std::max(0, last - spec.sliding_window + 1) : 0;
  Row out(static_cast<size_t>(spec.num_heads) * dim);
  for (int head = 0; head < spec.num_heads; ++head) {
    const int at = head / (spec.num_heads / spec.num_kv_heads) * dim;
    Row scores;
    for (int j = first; j <= last; ++j) {
      double score = 0;
      for (int i = 0; i < dim; ++i) score += query[head * dim + i] * keys[j][at + i];
      score *= spec.scale;
      scores.push_back(spec.softcap ? std::tanh(score / spec.softcap) * spec.softcap : score);
    }
    double sum = 0;
    for (double& score : scores) sum += score = std::exp(score);
    for (int j = first; j <= last; ++j) {
      for (int i = 0; i < dim; ++i) out[head * dim + i] += scores[j - first] / sum * values[j][at + i];
    }
  }
  return out;
}

// Logits of every token of a sequence. `hidden` gets what enters each layer, and what leaves the final norm: by token,
// then by layer.
std::vector<Row> reference(const DecoderSpec& spec, const std::vector<int64_t>& tokens,
                           std::vector<std::vector<Row>>* hidden = nullptr) {
  std::vector<std::vector<Row>> keys(spec.layers.size()), values(spec.layers.size());
  std::vector<Row> all;
  for (size_t p = 0; p < tokens.size(); ++p) {
    Row x = unpacked(spec.embedding, tokens[p]);
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] *= spec.embedding_scale;
      if (spec.position_embedding) x[i] += spec.position_embedding[p * x.size() + i];
    }
    x = normed(spec.embedding_norm, x);
    if (hidden) hidden->emplace_back();
    for (size_t l = 0; l < spec.layers.size(); ++l) {
      const LayerSpec& layer = spec.layers[l];
      if (hidden) hidden->back().push_back(x);
      const AttentionSpec& attention = layer.attention;
      const int q_dim = attention.num_heads * attention.head_dim, kv_dim = attention.num_kv_heads * attention.head_dim;
      Row qkv = product(attention.qkv, normed(layer.before_attention, x));
      if (attention.norm_spans_heads) {
        apply_norm(attention.q_norm, qkv.data(), q_dim);
        apply_norm(attention.k_norm, qkv.data() + q_dim, kv_dim);
      }
      for (int head = 0; head < attention.num_heads + attention.num_kv_heads; ++head) {
        double* values_of_head = qkv.data() + head * attention.head_dim;
        const NormSpec& norm = head < attention.num_heads ? attention.q_norm : attention.k_norm;
        if (!attention.norm_spans_heads) apply_norm(norm, values_of_head, attention.head_dim);
        if (attention.rope >= 0) rotate(spec.ropes[attention.rope], static_cast<int64_t>(p), values_of_head);
      }
      keys[l].emplace_back(qkv.begin() + q_dim, qkv.begin() + q_dim + kv_dim);
      values[l].emplace_back(qkv.begin() + q_dim + kv_dim, qkv.end());
      const Row attended = reference_attention(attention, keys[l], values[l], qkv);
      const Row branch = normed(layer.after_attention, product(attention.output, attended));
      for (size_t i = 0; i < x.size(); ++i) x[i] += branch[i] * spec.residual_scale;
      const Row input = normed(layer.before_mlp, x);
      const Row made = layer.moe.experts.empty() ? reference_mlp(layer.mlp, input) : reference_moe(layer.moe, input);
      const Row added = normed(layer.after_mlp, made);
      for (size_t i = 0; i < x.size(); ++i) x[i] += added[i] * spec.residual_scale;
    }
    if (hidden) hidden->back().push_back(normed(spec.final_norm, x));
    Row logits = product(spec.head, normed(spec.final_norm, x));
    for (double& logit : logits) {
      logit *= spec.logit_scale;
      if (spec.logit_softcap) logit = std::tanh(logit / spec.logit_softcap) * spec.logit_softcap;
    }
    all.push_back(std::move(logits));
  }
  return all;
}

// ---- Running the decoder
// ---------------------------------------------------------------------------------------------

struct Chunk {
  int request;
  int num_tokens;
};
using Schedule = std::vector<std::vector<Chunk>>;  // steps

// Sequences that are computed in pieces, each with its own blocks in a shuffled pool.
class Runner {
 public:
  Runner(Model& model, std::vector<int> lengths, int num_threads)
      : model_(model), team_(std::make_shared<ThreadTeam>(ThreadTeamOptions{num_threads, {}, false, 50})) {
    std::mt19937 random(7);
    int num_blocks = 1;
    for (const int length : lengths) {
      std::vector<int64_t>& sequence = tokens.emplace_back();
      for (int i = 0; i < length; ++i) sequence.push_back(static_cast<int64_t>(random() % model.o.vocab));
      num_blocks += blocks_of(length);
      max_blocks_ = std::max(max_blocks_, blocks_of(length));
    }
    std::vector<int32_t> ids(num_blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    size_t next = 0;
    for (const int length : lengths) {
      tables_.emplace_back(ids.begin() + next, ids.begin() + next + blocks_of(length));
      next += blocks_of(length);
    }
    done_.resize(lengths.size());
    decoder = std::make_unique<Decoder>(model.spec, model.make_caches(num_blocks), team_);
  }

  // The arrays of a step; they live until the next.
  void plan(const std::vector<Chunk>& chunks) {
    token_ids.clear(), positions.clear(), slots.clear(), seq_lens_.clear(), block_tables_.clear();
    cu_seqlens_ = {0};
    for (const auto& [request, num_tokens] : chunks) {
      for (int i = 0; i < num_tokens; ++i) {
        const int position = done_[request] + i, size = model_.o.block_size;
        token_ids.push_back(tokens[request][position]);
        positions.push_back(position);
        slots.push_back(static_cast<int64_t>(tables_[request][position / size]) * size + position % size);
      }
      done_[request] += num_tokens;
      seq_lens_.push_back(done_[request]);
      cu_seqlens_.push_back(static_cast<int32_t>(token_ids.size()));
      block_tables_.insert(block_tables_.end(), tables_[request].begin(), tables_[request].end());
      block_tables_.resize(seq_lens_.size() * max_blocks_, -1);
    }
    step_plan.update({block_tables_.data(), max_blocks_, max_blocks_, seq_lens_, cu_seqlens_, slots});
  }

  // Logits of every token, [request][position].
  std::vector<std::vector<std::vector<float>>> run(const Schedule& schedule) {
    std::vector<std::vector<std::vector<float>>> logits(tokens.size());
    for (const std::vector<Chunk>& chunks : schedule) {
      plan(chunks);
      std::vector<int64_t> all(token_ids.size()), best(all.size());
      std::iota(all.begin(), all.end(), 0);
      std::vector<float> made(all.size() * model_.o.vocab), best_values(all.size());
      decoder->step({token_ids, positions, all, made.data(), best.data(), best_values.data()}, step_plan);
      const float* row = made.data();
      size_t at = 0;
      for (const auto& [request, num_tokens] : chunks) {
        for (int i = 0; i < num_tokens; ++i, row += model_.o.vocab, ++at) {
          logits[request].emplace_back(row, row + model_.o.vocab);
          EXPECT_EQ(best[at], argmax(row, model_.o.vocab).index);
          EXPECT_EQ(best_values[at], row[best[at]]);
        }
      }
    }
    return logits;
  }

  std::vector<std::vector<int64_t>> tokens;
  std::unique_ptr<Decoder> decoder;
  std::vector<int64_t> token_ids, positions, slots;
  StepPlan step_plan;

 private:
  int blocks_of(int length) const { return (length + model_.o.block_size - 1) / model_.o.block_size; }

  Model& model_;
  std::shared_ptr<ThreadTeam> team_;
  int max_blocks_ = 0;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<int> done_;
  std::vector<int32_t> seq_lens_, cu_seqlens_, block_tables_;
};

double worst(const std::vector<std::vector<float>>& found, const std::vector<Row>& expected) {
  EXPECT_EQ(found.size(), expected.size());
  double error = 0;
  for (size_t p = 0; p < expected.size(); ++p) {
    for (size_t i = 0; i < expected[p].size(); ++i) {
      const double difference = std::abs(found[p][i] - expected[p][i]);
      error = difference <= error ? error : difference;  // NaN stays
    }
  }
  return error;
}

double spread(const std::vector<Row>& logits) {
  double squares = 0, count = 0;
  for (const Row& row : logits) {
    for (const double x : row) squares += x * x, ++count;
  }
  return std::sqrt(squares / count);
}

const Schedule kWhole = {{{0, 13}, {1, 7}, {2, 1}}};
const Schedule kPieces = {{{0, 5}, {1, 3}}, {{2, 1}, {0, 1}, {1, 4}}, {{0, 1}}, {{0, 6}}};

std::vector<Options> families() {
  std::vector<Options> all;
  const auto add = [&](const std::string& name, const std::function<void(Options&)>& change) {
    Options o;
    o.name = name;
    change(o);
    all.push_back(o);
  };
  add("llama", [](Options&) {});
  add("biases", [](Options& o) { o.biases = true; });
  add("layer_norm_and_learned_positions", [](Options& o) {
    o.norm = NormKind::kLayer, o.rope = Rope::kNone, o.learned_positions = true, o.gated = false, o.biases = true;
    o.activation = Activation::kGeluTanh;
  });
  add("norms_after_and_softcaps", [](Options& o) {
    o.after_norms = true, o.softcap = 3, o.logit_softcap = 2, o.embedding_scale = 1.7f, o.window_of_odd_layers = 5;
    o.activation = Activation::kGeluTanh;
  });
  add("norms_only_after_and_over_all_heads",
      [](Options& o) { o.before_norms = false, o.after_norms = true, o.spanning_norms = true; });
  add("norms_of_heads", [](Options& o) { o.head_norms = true; });
  add("scales",
      [](Options& o) { o.embedding_scale = 3, o.residual_scale = 0.4f, o.logit_scale = 0.3f, o.biases = true; });
  add("layers_without_rotation", [](Options& o) { o.last_layer_without_rope = true; });
  add("pairs_side_by_side", [](Options& o) { o.rope = Rope::kInterleaved; });
  add("part_of_a_head_rotates", [](Options& o) { o.rope = Rope::kPartial, o.window_of_odd_layers = 3; });
  add("odd_sizes", [](Options& o) {
    o.hidden = 37, o.inner = 45, o.dim = 6, o.heads = 3, o.kv_heads = 1, o.vocab = 131, o.embedding_norm = true;
    o.activation = Activation::kGelu;
  });
  add("relu_squared", [](Options& o) { o.gated = false, o.activation = Activation::kReluSquared; });
  add("wide", [](Options& o) { o.hidden = 160, o.inner = 160, o.vocab = 5000, o.dim = 64, o.layers = 1; });
  add("experts", [](Options& o) { o.experts = 5; });
  add("experts_with_norm", [](Options& o) { o.experts = 8, o.top = 3, o.norm_top = true, o.after_norms = true; });
  add("experts_top_then_softmax", [](Options& o) {
    o.experts = 20, o.top = 4, o.router = RouterKind::kTopThenSoftmax, o.biases = true, o.inner = 40;
  });
  return all;
}

class Families : public testing::TestWithParam<Options> {};

TEST_P(Families, LogitsEqualTheReferenceForAnyMixtureOfChunksAndThreads) {
  for (const int block_size : {1, 4, 32}) {
    Options options = GetParam();
    options.block_size = block_size;
    Model model(options);
    std::vector<std::vector<Row>> expected;
    for (const int num_threads : {1, 2, 3}) {
      Runner whole(model, {13, 7, 1}, num_threads);
      if (expected.empty()) {
        for (const auto& tokens : whole.tokens) expected.push_back(reference(model.spec, tokens));
      }
      const auto found = whole.run(kWhole);
      Runner pieces(model, {13, 7, 1}, num_threads);
      const auto found_in_pieces = pieces.run(kPieces);
      for (size_t r = 0; r < expected.size(); ++r) {
        EXPECT_LT(worst(found[r], expected[r]), 2e-5 * (1 + spread(expected[r]))) << "request " << r;
        EXPECT_LT(worst(found_in_pieces[r], expected[r]), 2e-5 * (1 + spread(expected[r]))) << "in pieces, " << r;
      }
    }
  }
}

TEST_P(Families, BFloat16StaysNearTheReference) {
  Options options = GetParam();
  options.format = WeightFormat::kBFloat16;
  options.cache = DType::kBFloat16;
  Model model(options);
  for (const int num_threads : {1, 2}) {
    for (const Schedule& schedule : {kWhole, kPieces}) {
      Runner runner(model, {13, 7, 1}, num_threads);
      const auto found = runner.run(schedule);
      for (size_t r = 0; r < found.size(); ++r) {
        const auto expected = reference(model.spec, runner.tokens[r]);
        // Near-ties of a router may fall the other way; a wrong forward is off by the spread itself.
        const double bound = options.experts ? 0.5 : 0.1;
        EXPECT_LT(worst(found[r], expected), bound * spread(expected)) << "request " << r;
      }
    }
  }
}

// Rounding of the weights is in the reference; what is left is that of the activations.
TEST(Decoder, IntegerWeightsStayNearTheReference) {
  for (const WeightFormat format : {WeightFormat::kInt8, WeightFormat::kInt8Group, WeightFormat::kInt4Group}) {
    for (Options options : families()) {
      if (options.name != "llama" && options.name != "experts" && options.name != "norms_after_and_softcaps") continue;
      options.format = format;
      options.group_size = 32;
      Model model(options);
      for (const Schedule& schedule : {kWhole, kPieces}) {
        Runner runner(model, {13, 7, 1}, 2);
        const auto found = runner.run(schedule);
        for (size_t r = 0; r < found.size(); ++r) {
          const auto expected = reference(model.spec, runner.tokens[r]);
          const double bound = options.experts ? 0.5 : 0.15;
          EXPECT_LT(worst(found[r], expected), bound * spread(expected))
              << options.name << ", " << name(format) << ", request " << r;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Decoder, Families, testing::ValuesIn(families()),
                         [](const auto& info) { return info.param.name; });

TEST(Decoder, ManyRowsEqualTheReferenceWhereEachThreadHasItsOwn) {
  for (const char* name : {"llama", "experts", "norms_after_and_softcaps"}) {
    for (Options options : families()) {
      if (options.name != name) continue;
      options.hidden = 32, options.inner = 32, options.vocab = 40, options.heads = 2, options.kv_heads = 1;
      Model model(options);
      Runner runner(model, {301, 9}, 2);
      const auto found = runner.run({{{1, 8}, {0, 290}}, {{0, 11}, {1, 1}}});
      for (size_t r = 0; r < found.size(); ++r) {
        const auto expected = reference(model.spec, runner.tokens[r]);
        EXPECT_LT(worst(found[r], expected), 3e-5 * (1 + spread(expected))) << name << ", request " << r;
      }
    }
  }
}

TEST(Decoder, ShowsTheResidualStreamWhereItIsAskedFor) {
  for (Options options : families()) {
    SCOPED_TRACE(options.name);
    for (const int length : {5, 300}) {  // 300: each of two threads has rows of its own
      if (length == 300 && options.name != "llama" && options.name != "experts") continue;
      options.num_positions = 512;
      Model model(options);
      model.spec.hidden_layers = options.layers == 1 ? std::vector<int>{1} : std::vector<int>{0, 1, options.layers};
      const size_t count = model.spec.hidden_layers.size();
      Runner runner(model, {length}, 2);
      std::vector<std::vector<Row>> expected;
      reference(model.spec, runner.tokens[0], &expected);
      std::vector<float> shown;
      for (const int part : {length - 2, 2}) {
        runner.plan({{0, part}});
        std::vector<float> hidden(part * count * options.hidden);
        DecoderInputs inputs;
        inputs.token_ids = runner.token_ids;
        inputs.positions = runner.positions;
        inputs.hidden = hidden.data();
        runner.decoder->step(inputs, runner.step_plan);
        shown.insert(shown.end(), hidden.begin(), hidden.end());
      }
      double error = 0;
      for (int token = 0; token < length; ++token) {
        for (size_t k = 0; k < count; ++k) {
          const Row& row = expected[token][model.spec.hidden_layers[k]];
          for (int i = 0; i < options.hidden; ++i) {
            error = std::max(error, std::abs(row[i] - shown[(token * count + k) * options.hidden + i]));
          }
        }
      }
      EXPECT_LT(error, 1e-4 * std::max(1.0, spread(expected.back())));
    }
  }
}

TEST(Decoder, HiddenLayersThatDoNotExistAreRefused) {
  for (const std::vector<int>& layers : {std::vector<int>{3}, {-1}, {1, 1}, {2, 0}}) {
    Model model(Options{});
    model.spec.hidden_layers = layers;
    EXPECT_THROW(Runner(model, {1}, 1), std::invalid_argument);
  }
}

TEST(Decoder, ARequestGetsTheSameBitsWhateverTheOthersAre) {
  Model model(families()[0]);
  Runner first(model, {6, 9}, 2);
  const auto found = first.run({{{0, 6}, {1, 9}}});
  Runner second(model, {6, 9}, 2);
  for (int64_t& token : second.tokens[1]) token = (token + 5) % model.o.vocab;
  const auto again = second.run({{{0, 6}, {1, 9}}});
  EXPECT_EQ(found[0], again[0]);
  EXPECT_NE(found[1], again[1]);
}

TEST(Decoder, OnlyWantedRowsAndTheBestAloneAgreeWithAllLogits) {
  Options options;
  options.vocab = 9000;  // several chunks of columns per thread
  options.logit_softcap = 4;
  Model model(options);
  Runner all(model, {12, 5}, 3);
  const auto logits = all.run({{{0, 12}, {1, 5}}});
  Runner some(model, {12, 5}, 3);
  some.plan({{0, 12}, {1, 5}});
  const std::vector<int64_t> wanted = {3, 11, 16};
  std::vector<int64_t> best(3, -1);
  std::vector<float> values(3);
  some.decoder->step({some.token_ids, some.positions, wanted, nullptr, best.data(), values.data()}, some.step_plan);
  const std::vector<float>* rows[] = {&logits[0][3], &logits[0][11], &logits[1][4]};
  for (int i = 0; i < 3; ++i) {
    const Best expected = argmax(rows[i]->data(), options.vocab);
    EXPECT_EQ(best[i], expected.index);
    EXPECT_NEAR(values[i], expected.value, 1e-5);
  }
}

TEST(Decoder, ABannedTokenIsNeverTheBestOfItsRow) {
  Options options;
  options.vocab = 9000;
  Model model(options);
  const std::vector<int64_t> wanted = {3, 4, 11};
  for (const int num_threads : {1, 3}) {
    std::vector<int64_t> banned_rows, banned_ids;
    std::vector<std::vector<float>> rows(3);
    for (int round = 0; round < 4; ++round) {
      Runner runner(model, {12}, num_threads);
      runner.plan({{0, 12}});
      std::vector<float> logits(3 * options.vocab), values(3);
      std::vector<int64_t> best(3);
      runner.decoder->step({runner.token_ids, runner.positions, wanted, round == 0 ? logits.data() : nullptr,
                            best.data(), values.data(), banned_rows, banned_ids},
                           runner.step_plan);
      for (int row = 0; row < 3; ++row) {
        if (round == 0)
          rows[row].assign(logits.begin() + row * options.vocab, logits.begin() + (row + 1) * options.vocab);
        const Best expected = argmax(rows[row].data(), options.vocab);
        EXPECT_EQ(best[row], expected.index);
        EXPECT_NEAR(values[row], expected.value, 1e-5);
        if (row == 1) continue;  // its neighbours are banned from more in each round
        banned_rows.push_back(row);
        banned_ids.push_back(best[row]);
        rows[row][best[row]] = -std::numeric_limits<float>::infinity();
      }
      for (const int64_t outside : {int64_t{-1}, int64_t{options.vocab}, int64_t{1} << 60}) {
        banned_rows.push_back(1);
        banned_ids.push_back(outside);
      }
    }
  }
}

TEST(Decoder, BannedRowsThatDoNotExistAreRefused) {
  Model model(Options{});
  const std::vector<int64_t> wanted = {4}, ids = {0};
  int64_t best = -1;
  for (const int64_t row : {-1, 1}) {
    const std::vector<int64_t> rows = {row};
    Runner runner(model, {5}, 1);
    runner.plan({{0, 5}});
    EXPECT_THROW(runner.decoder->step({runner.token_ids, runner.positions, wanted, nullptr, &best, nullptr, rows, ids},
                                      runner.step_plan),
                 std::out_of_range);
    EXPECT_THROW(runner.decoder->step({runner.token_ids, runner.positions, wanted, nullptr, &best, nullptr, rows, {}},
                                      runner.step_plan),
                 std::invalid_argument);
  }
}

TEST(Decoder, OfEqualLogitsTheFirstIsTheBestAndTheFirstNanIsReported) {
  Options options;
  options.vocab = 700;
  Model model(options);
  std::vector<float> bias(options.vocab, -1e9f);
  for (const int64_t column : {650, 123, 400}) bias[column] = 0;
  // Equal biases of a size that swallows the products.
  for (float& x : bias) x = x == 0 ? 1e9f : x;
  model.spec.head.bias = bias.data();
  const std::vector<int64_t> wanted = {4};
  int64_t best = -1;
  float value = 0;
  for (const int num_threads : {1, 2, 3}) {
    Runner runner(model, {5}, num_threads);
    runner.plan({{0, 5}});
    runner.decoder->step({runner.token_ids, runner.positions, wanted, nullptr, &best, &value}, runner.step_plan);
    EXPECT_EQ(best, 123);
  }
  bias[640] = bias[401] = std::numeric_limits<float>::quiet_NaN();
  for (const int num_threads : {1, 2, 3}) {
    Runner runner(model, {5}, num_threads);
    runner.plan({{0, 5}});
    runner.decoder->step({runner.token_ids, runner.positions, wanted, nullptr, &best, &value}, runner.step_plan);
    EXPECT_EQ(best, 401);
    EXPECT_TRUE(std::isnan(value));
  }
}

TEST(Decoder, TokensWithoutASlotAreNotStored) {
  Model model(families()[0]);
  Runner runner(model, {4}, 2);
  runner.plan({{0, 4}});
  const auto before = model.caches;
  std::vector<int64_t> none;
  std::fill(runner.slots.begin(), runner.slots.end(), -1);
  runner.decoder->step({runner.token_ids, runner.positions, none, nullptr, nullptr, nullptr}, runner.step_plan);
  EXPECT_EQ(model.caches, before);
}

TEST(Decoder, WhatDoesNotExistIsRefusedAndNothingIsWritten) {
  Options options;
  options.num_positions = 6;
  Model model(options);
  Runner runner(model, {6}, 2);
  runner.plan({{0, 4}});
  const auto before = model.caches;
  std::vector<float> logits(options.vocab, -7);
  const auto step = [&](const std::vector<int64_t>& tokens, const std::vector<int64_t>& positions,
                        const std::vector<int64_t>& wanted) {
    runner.decoder->step({tokens, positions, wanted, logits.data(), nullptr, nullptr}, runner.step_plan);
  };
  const std::vector<int64_t>&tokens = runner.token_ids, &positions = runner.positions;
  EXPECT_THROW(step({0, 1, options.vocab, 3}, positions, {3}), std::out_of_range);
  EXPECT_THROW(step({0, -1, 2, 3}, positions, {3}), std::out_of_range);
  EXPECT_THROW(step(tokens, {0, 1, 2, 6}, {3}), std::out_of_range);
  EXPECT_THROW(step(tokens, {0, 1, -2, 3}, {3}), std::out_of_range);
  EXPECT_THROW(step(tokens, positions, {4}), std::out_of_range);
  EXPECT_THROW(step(tokens, positions, {2, 2}), std::out_of_range);
  EXPECT_THROW(step({0, 1, 2}, {0, 1, 2}, {2}), std::invalid_argument);
  const int64_t slot = runner.slots[1];
  runner.slots[1] = 1 << 20;
  EXPECT_THROW(step(tokens, positions, {3}), std::out_of_range);
  runner.slots[1] = slot;
  const std::vector<int32_t> table = {0, 99}, seq_lens = {6}, cu_seqlens = {0, 4};
  StepPlan bad;
  bad.update({table.data(), 2, 2, seq_lens, cu_seqlens, runner.slots});
  EXPECT_THROW(runner.decoder->step({tokens, positions, {}, nullptr, nullptr, nullptr}, bad), std::out_of_range);
  EXPECT_EQ(model.caches, before);
  EXPECT_EQ(logits[0], -7);
  step(tokens, positions, {3});
  EXPECT_NE(model.caches, before);
}

TEST(Decoder, SizesThatDoNotFitAreRefusedByName) {
  const auto refuses = [](const std::function<void(DecoderSpec&)>& change, const std::string& part) {
    Model model(families()[0]);
    change(model.spec);
    try {
      Decoder(model.spec, model.make_caches(4), std::make_shared<ThreadTeam>(ThreadTeamOptions{}));
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      return;
    }
    ADD_FAILURE() << part << " was accepted";
  };
  refuses([](DecoderSpec& spec) { spec.hidden_size += 1; }, "embedding");
  refuses([](DecoderSpec& spec) { spec.layers[1].attention.num_heads = 3; }, "layers[1].attention");
  refuses([](DecoderSpec& spec) { spec.layers[0].attention.head_dim = 16; }, "cache");
  refuses([](DecoderSpec& spec) { spec.layers[0].attention.rope = 2; }, "rope");
  refuses([](DecoderSpec& spec) { spec.layers[0].mlp.is_gated = false; }, "mlp");
  refuses([](DecoderSpec& spec) { spec.layers.pop_back(); }, "caches");
  refuses([](DecoderSpec& spec) { spec.head.weight.data = nullptr; }, "head");
  refuses([](DecoderSpec& spec) { spec.ropes[0].rotary_dim = 22; }, "rotary_dim");
}

TEST(Decoder, TheProfileIsEmptyUntilItIsSwitchedOn) {
  Model model(families()[0]);
  Runner runner(model, {8}, 2);
  runner.run({{{0, 4}}});
  EXPECT_TRUE(runner.decoder->profile().empty());
  runner.decoder->set_profiling(true);
  runner.run({{{0, 4}}});
  double sum = 0;
  for (const auto& [phase, seconds] : runner.decoder->profile()) sum += seconds;
  EXPECT_GT(sum, 0);
  EXPECT_EQ(std::string(runner.decoder->profile()[1].first), "embedding");
}

}  // namespace
}  // namespace llmopt

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    std::cout << "instruction set: " << llmopt::name(llmopt::selected_isa()) << "\n";
  } catch (const std::exception& error) {
    const char* requested = std::getenv("LLMOPT_ISA");
    std::cout << "this machine has no " << (requested ? requested : "such level") << ": " << error.what() << "\n";
    return 0;
  }
  return RUN_ALL_TESTS();
}
