#include "llmopt/tree_search.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "llmopt/decoder.h"

namespace llmopt {
namespace {

struct Node {
  int64_t token_id;
  int parent;  // in the pool; -1: the newest token
  float score;
};

// A node of the frontier, once it has been chosen to be forwarded.
struct Forwarded {
  int node;       // in the pool
  int origin;     // which of the frontier before led here
  uint64_t mask;  // forwarded nodes of its request on the path to it, itself included
};

// The tree of one request.
struct Tree {
  std::vector<Node> pool;
  std::vector<Forwarded> frontier;
};

// The best `count` of n scores, equal ones in ascending order.
void choose_best(const std::vector<float>& scores, size_t count, std::vector<int>& chosen) {
  chosen.resize(scores.size());
  std::iota(chosen.begin(), chosen.end(), 0);
  count = std::min(count, chosen.size());
  const auto before = [&](int a, int b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; };
  std::partial_sort(chosen.begin(), chosen.begin() + static_cast<int64_t>(count), chosen.end(), before);
  chosen.resize(count);
}

}  // namespace

FeatureRows::FeatureRows(const float* hidden, int64_t num_tokens, int64_t num_layers, int64_t size,
                         std::span<const int64_t> rows, std::span<const int64_t> taps)
    : num_rows(static_cast<int64_t>(rows.size())) {
  values.reserve(rows.size() * taps.size() * size);
  for (const int64_t row : rows) {
    for (const int64_t tap : taps) {
      if (row < 0 || row >= num_tokens || tap < 0 || tap >= num_layers) {
        throw std::out_of_range("layer " + std::to_string(tap) + " of token " + std::to_string(row) + ": there are " +
                                std::to_string(num_layers) + " layers and " + std::to_string(num_tokens) + " tokens.");
      }
      const float* first = hidden + (row * num_layers + tap) * size;
      values.insert(values.end(), first, first + size);
    }
  }
}

class TreeSearch::Impl {
 public:
  Impl(Decoder& decoder, std::vector<int64_t> target_ids) : decoder_(decoder), target_ids_(std::move(target_ids)) {
    if (static_cast<int64_t>(target_ids_.size()) != decoder.spec().num_logits()) {
      throw std::invalid_argument(std::to_string(target_ids_.size()) + " target_ids, the head has " +
                                  std::to_string(decoder.spec().num_logits()) + " tokens.");
    }
  }

  std::vector<DraftTreeNodes> run(const TreeSearchInputs& inputs) {
    check(inputs);
    num_requests_ = static_cast<int>(inputs.lengths.size());
    if (trees_.size() < inputs.lengths.size()) trees_.resize(inputs.lengths.size());
    for (int r = 0; r < num_requests_; ++r) trees_[r].pool.clear();
    lay_tables(inputs);
    gather_features(inputs);
    num_levels_ = 0;
    if (inputs.depth == 0) {
      forward(inputs);
      return std::vector<DraftTreeNodes>(num_requests_);
    }
    double before = num_requests_;
    while (num_levels_ < inputs.depth) {
      forward(inputs);
      const double mass = grow(inputs);
      ++num_levels_;
      if (!(mass * mass / before >= inputs.least_gain)) break;
      before = mass;
    }
    std::vector<DraftTreeNodes> found(num_requests_);
    for (int r = 0; r < num_requests_; ++r) found[r] = best(trees_[r], inputs.counts[r], inputs.least_chance);
    return found;
  }

  int num_levels() const { return num_levels_; }

 private:
  static void check(const TreeSearchInputs& inputs) {
    const size_t count = inputs.lengths.size();
    if (inputs.block_tables.size() != count || inputs.num_pairs.size() != count || inputs.counts.size() != count) {
      throw std::invalid_argument("block_tables, num_pairs, lengths and counts have one entry per request.");
    }
    if (inputs.width < 1 || inputs.depth < 0 || inputs.width * (inputs.depth - 1) > kMaxDrafts) {
      throw std::invalid_argument("width " + std::to_string(inputs.width) + " and depth " +
                                  std::to_string(inputs.depth) +
                                  ": width is at least 1, depth at least 0, and width * (depth - 1) at most " +
                                  std::to_string(kMaxDrafts) + ".");
    }
    if (inputs.block_size < 1) throw std::invalid_argument("block_size is at least 1.");
    int64_t total = 0;
    for (size_t r = 0; r < count; ++r) {
      if (inputs.lengths[r] < 1 || inputs.num_pairs[r] < 0) {
        throw std::invalid_argument("request " + std::to_string(r) + " has " + std::to_string(inputs.lengths[r]) +
                                    " new pairs and " + std::to_string(inputs.num_pairs[r]) +
                                    " before them: it needs a new one.");
      }
      total += inputs.lengths[r];
      const int64_t needed =
          inputs.num_pairs[r] + inputs.lengths[r] + int64_t{inputs.width} * std::max(inputs.depth - 1, 0);
      if (needed > static_cast<int64_t>(inputs.block_tables[r].size()) * inputs.block_size) {
        throw std::invalid_argument(
            "request " + std::to_string(r) + " has " + std::to_string(inputs.block_tables[r].size()) + " blocks of " +
            std::to_string(inputs.block_size) + ", and needs room for " + std::to_string(needed) + " places.");
      }
    }
    if (static_cast<int64_t>(inputs.token_ids.size()) != total ||
        static_cast<int64_t>(inputs.positions.size()) != total) {
      throw std::invalid_argument("token_ids and positions have one entry per new pair.");
    }
  }

  void lay_tables(const TreeSearchInputs& inputs) {
    max_blocks_ = 0;
    for (const auto& table : inputs.block_tables) max_blocks_ = std::max(max_blocks_, table.size());
    tables_.assign(max_blocks_ * num_requests_, 0);
    for (int r = 0; r < num_requests_; ++r) {
      std::ranges::copy(inputs.block_tables[r], tables_.begin() + static_cast<int64_t>(r * max_blocks_));
    }
  }

  void gather_features(const TreeSearchInputs& inputs) {
    const DraftFront& front = decoder_.spec().draft;
    const int64_t hidden = decoder_.spec().hidden_size;
    const int64_t width = front.kind == DraftFront::Kind::kSplit ? front.fc.weight.shape.num_inputs : hidden;
    features_.clear();
    for (const FeatureRows* piece : inputs.features) {
      if (static_cast<int64_t>(piece->values.size()) != piece->num_rows * width) {
        throw std::invalid_argument(std::to_string(piece->values.size()) + " features for " +
                                    std::to_string(piece->num_rows) + " pairs, the head reads " +
                                    std::to_string(width) + " of each.");
      }
      features_.insert(features_.end(), piece->values.begin(), piece->values.end());
    }
    if (features_.size() != inputs.token_ids.size() * width) {
      throw std::invalid_argument("features for " + std::to_string(static_cast<int64_t>(features_.size()) / width) +
                                  " pairs, there are " + std::to_string(inputs.token_ids.size()) + ".");
    }
  }

  int64_t slot(const TreeSearchInputs& inputs, int request, int64_t place) const {
    return int64_t{inputs.block_tables[request][place / inputs.block_size]} * inputs.block_size +
           place % inputs.block_size;
  }

  // The next level: the new pairs at first, then the frontier of each tree.
  void forward(const TreeSearchInputs& inputs) {
    const bool is_first = num_levels_ == 0;
    const bool is_tree = !is_first && inputs.width > 1;  // a chain sees all before it
    const int64_t hidden = decoder_.spec().hidden_size;
    seq_lens_.resize(num_requests_);
    cu_seqlens_.assign(1, 0);
    slots_.clear();
    indices_.clear();
    token_ids_.clear();
    positions_.clear();
    masks_.clear();
    num_drafts_.assign(num_requests_, static_cast<int32_t>(num_levels_ * inputs.width));
    states_in_.swap(states_out_);
    gathered_.clear();
    int64_t pair = 0, row_before = 0;
    for (int r = 0; r < num_requests_; ++r) {
      const int64_t end = inputs.num_pairs[r] + inputs.lengths[r];
      const int64_t last = inputs.positions[pair + inputs.lengths[r] - 1];
      if (is_first) {
        for (int64_t i = 0; i < inputs.lengths[r]; ++i) slots_.push_back(slot(inputs, r, inputs.num_pairs[r] + i));
        seq_lens_[r] = static_cast<int32_t>(end);
        if (inputs.depth > 0) indices_.push_back(pair + inputs.lengths[r] - 1);
      } else {
        const Tree& tree = trees_[r];
        const int64_t first = end + int64_t{num_levels_ - 1} * inputs.width;
        for (size_t i = 0; i < tree.frontier.size(); ++i) {
          const Forwarded& node = tree.frontier[i];
          indices_.push_back(static_cast<int64_t>(slots_.size()));
          slots_.push_back(slot(inputs, r, first + static_cast<int64_t>(i)));
          token_ids_.push_back(tree.pool[node.node].token_id);
          positions_.push_back(last + num_levels_);
          masks_.push_back(node.mask);
          const float* state = states_in_.data() + (row_before + node.origin) * hidden;
          gathered_.insert(gathered_.end(), state, state + hidden);
        }
        row_before += num_levels_ == 1 ? 1 : inputs.width;
        seq_lens_[r] = static_cast<int32_t>(first + static_cast<int64_t>(tree.frontier.size()));
      }
      cu_seqlens_.push_back(static_cast<int32_t>(slots_.size()));
      pair += inputs.lengths[r];
    }
    StepInputs step;
    step.block_tables = tables_.data();
    step.block_table_stride = step.max_blocks = static_cast<int64_t>(max_blocks_);
    step.seq_lens = seq_lens_;
    step.cu_seqlens_q = cu_seqlens_;
    step.slot_mapping = slots_;
    if (is_tree) {
      step.num_drafts = num_drafts_;
      step.draft_masks = masks_;
    }
    plan_.update(step);
    const size_t rows = indices_.size();
    top_ids_.resize(rows * inputs.width);
    log_probs_.resize(rows * inputs.width);
    states_out_.resize(rows * hidden);
    DecoderInputs given;
    given.token_ids = is_first ? std::span<const int64_t>(inputs.token_ids) : token_ids_;
    given.positions = is_first ? std::span<const int64_t>(inputs.positions) : positions_;
    given.logits_indices = indices_;
    given.features = is_first ? features_.data() : nullptr;
    given.states = is_first ? nullptr : gathered_.data();
    if (inputs.depth > 0) {
      given.states_out = states_out_.data();
      given.top = inputs.width;
      given.top_ids = top_ids_.data();
      given.top_log_probs = log_probs_.data();
    }
    decoder_.step(given, plan_);
  }

  // Adds the followers of each frontier and chooses the next one. Returns the chances of its nodes, over all requests.
  double grow(const TreeSearchInputs& inputs) {
    double mass = 0;
    const int width = inputs.width, num_nodes = num_levels_ == 0 ? 1 : width;
    const int num_forwarded = num_levels_ * width;
    const int32_t* id = top_ids_.data();
    const float* log_prob = log_probs_.data();
    for (int r = 0; r < num_requests_; ++r) {
      Tree& tree = trees_[r];
      const auto size = static_cast<int>(tree.pool.size());
      scores_.clear();
      for (int n = 0; n < num_nodes; ++n) {
        const int parent = num_levels_ == 0 ? -1 : tree.frontier[n].node;
        for (int k = 0; k < width; ++k, ++id, ++log_prob) {
          const float own = std::isnan(*log_prob) ? -std::numeric_limits<float>::infinity() : *log_prob;
          const float score = parent < 0 ? own : own + tree.pool[parent].score;
          tree.pool.push_back({target_ids_[*id], parent, score});
          scores_.push_back(score);
        }
      }
      choose_best(scores_, width, chosen_);
      next_.clear();
      for (const int place : chosen_) {
        const int origin = place / width;
        const uint64_t before = num_levels_ == 0 ? 0 : tree.frontier[origin].mask;
        const int bit = num_forwarded + static_cast<int>(next_.size());
        next_.push_back({size + place, origin, before | (bit < kMaxDrafts ? uint64_t{1} << bit : 0)});
        mass += std::exp(static_cast<double>(scores_[place]));
      }
      tree.frontier.swap(next_);
    }
    return mass;
  }

  DraftTreeNodes best(const Tree& tree, int64_t count, double least_chance) {
    scores_.clear();
    for (const Node& node : tree.pool) scores_.push_back(node.score);
    choose_best(scores_, static_cast<size_t>(std::max<int64_t>(count, 0)), chosen_);
    place_of_.assign(tree.pool.size(), -1);
    DraftTreeNodes found;
    for (const int node : chosen_) {
      const float score = scores_[node];
      if (score == -std::numeric_limits<float>::infinity() || std::exp(score) < least_chance) break;
      const int parent = tree.pool[node].parent;
      place_of_[node] = static_cast<int>(found.token_ids.size());
      found.token_ids.push_back(tree.pool[node].token_id);
      found.parents.push_back(parent < 0 ? -1 : place_of_[parent]);
      found.scores.push_back(score);
    }
    return found;
  }

  Decoder& decoder_;
  std::vector<int64_t> target_ids_;
  StepPlan plan_;
  int num_requests_ = 0, num_levels_ = 0;
  std::vector<Tree> trees_;
  size_t max_blocks_ = 0;
  std::vector<int32_t> tables_, seq_lens_, cu_seqlens_, num_drafts_, top_ids_;
  std::vector<int64_t> slots_, indices_, token_ids_, positions_;
  std::vector<uint64_t> masks_;
  std::vector<float> features_, states_in_, states_out_, gathered_, log_probs_, scores_;
  std::vector<int> chosen_, place_of_;
  std::vector<Forwarded> next_;
};

TreeSearch::TreeSearch(Decoder& decoder, std::vector<int64_t> target_ids)
    : impl_(std::make_unique<Impl>(decoder, std::move(target_ids))) {}

TreeSearch::~TreeSearch() = default;

std::vector<DraftTreeNodes> TreeSearch::run(const TreeSearchInputs& inputs) { return impl_->run(inputs); }

int TreeSearch::num_levels() const { return impl_->num_levels(); }

}  // namespace llmopt
