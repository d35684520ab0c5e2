// What attention needs to know of a step, the same for all layers, and how its work is split.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

namespace llmopt {

// Views of the batch's arrays. The caller owns the memory and leaves it unchanged until the step is over.
struct StepInputs {
  const int32_t* block_tables = nullptr;  // [B, max_blocks], rows block_table_stride apart
  int64_t block_table_stride = 0;
  int64_t max_blocks = 0;
  std::span<const int32_t> seq_lens;      // [B] keys of each request, this step's tokens included
  std::span<const int32_t> cu_seqlens_q;  // [B + 1] first query row of each request
  std::span<const int64_t> slot_mapping;  // [T] place of each new token, negative: not stored; may be empty
  // Drafts that are trees. The last num_drafts tokens of a request are drafts, and draft i lies behind those before it
  // in the cache, whatever it follows. Bit j of its mask: it sees draft j, which is on the path to it; its own bit is
  // the last. So it stands as far behind the request's newest token as there are bits. Other tokens have no bits. The
  // first of the drafts may be no queries: their keys are there already. Both are empty when no drafts are trees.
  std::span<const int32_t> num_drafts = {};    // [B] at most kMaxDrafts
  std::span<const uint64_t> draft_masks = {};  // [T]
};

inline constexpr int kMaxDrafts = 64;

// The properties of a layer that the split depends on.
struct WorkShape {
  int num_kv_heads;
  int group;  // query heads per key head
  int block_size;
  int64_t num_blocks;
  int head_dim;
  int head_dim_v;
  int item_size;       // bytes per element of the cache
  int sliding_window;  // 0: none
  int rows_limit;      // up to this many rows (queries * group) a request takes the kernel for few rows

  bool operator==(const WorkShape&) const = default;
};

// Some consecutive queries of one request against a range of its keys; the same for each key head.
struct WorkItem {
  int request;
  int q_begin;    // first query, counted within the request
  int num_q;      // queries; rows of the tile are num_q * group
  int key_begin;  // first key
  int key_end;    // one past the last key
  int part;       // which of num_parts key ranges this is
  int num_parts;  // 1: the item writes the output itself
  int split;      // number of the group of parts, when num_parts > 1
  int64_t row;    // first row of this part in the partial results of one key head, when num_parts > 1
  bool few_rows;  // which kernel
  double cost;    // rough time in ns
};

// The split of a step for one WorkShape. The rule looks at one request at a time, so what a request computes does not
// depend on the others in the batch.
struct WorkList {
  WorkShape shape;
  std::vector<WorkItem> items;  // costly ones first
  int num_splits = 0;
  int64_t num_partial_rows = 0;  // of one key head
  int max_rows = 0;              // largest num_q * group
  bool has_tiles = false;        // some item does not take the kernel for few rows
  double cost_per_head = 0;      // rough time in ns on one thread, for one key head
};

class StepPlan {
 public:
  // Take a new step. Throws std::invalid_argument when the arrays do not fit together.
  void update(const StepInputs& inputs);

  const StepInputs& inputs() const { return inputs_; }
  int num_requests() const { return static_cast<int>(inputs_.seq_lens.size()); }
  int64_t num_tokens() const { return num_tokens_; }

  // The split for layers of this shape, made by the first such layer of the step.
  // Throws std::out_of_range when a visible entry of a block table is not a block of the cache.
  const WorkList& work(const WorkShape& shape);

  // Partial results of split work, and one counter per split that is zero between calls.
  float* partials(size_t num_floats);
  std::atomic<int>* split_counters(size_t num_counters);

 private:
  void fill(WorkList& list) const;
  int first_position(int request, int q_begin, int num_q) const;
  void check_blocks(const WorkShape& shape) const;

  StepInputs inputs_;
  int64_t num_tokens_ = 0;
  std::deque<WorkList> lists_;  // the first num_lists_ belong to this step; the others keep their memory for later
  size_t num_lists_ = 0;
  std::vector<float> partials_;
  std::unique_ptr<std::atomic<int>[]> counters_;
  size_t num_counters_ = 0;
};

}  // namespace llmopt
