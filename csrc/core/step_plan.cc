#include "llmopt/step_plan.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

namespace llmopt {
namespace {

// Decoding: a range of keys short enough to share a long context among threads and long enough that merging the parts
// costs nothing.
constexpr int kRowsKeysPerPart = 512;
// The same for a few queries in a tile.
constexpr int kTileKeysPerPart = 1024;
// Rows of a tile: more reuse each key more often, fewer balance better.
constexpr int kMaxTileRows = 512;
// A request with this many tiles over all key heads feeds the threads without splitting its keys.
constexpr int kEnoughTiles = 16;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

// Rough times of one thread, good enough to order work and to decide whether threads pay.
double item_cost(const WorkShape& shape, int rows, int keys) {
  constexpr double kBytesPerNs = 10, kMacsPerNs = 60, kOverheadNs = 200;
  const double elements = static_cast<double>(keys) * (shape.head_dim + shape.head_dim_v);
  return kOverheadNs + elements * shape.item_size / kBytesPerNs + elements * rows / kMacsPerNs;
}

void check_drafts(const StepInputs& inputs) {
  const auto& cu = inputs.cu_seqlens_q;
  if (inputs.draft_masks.empty()) return;
  if (inputs.num_drafts.size() != inputs.seq_lens.size() ||
      inputs.draft_masks.size() != static_cast<size_t>(cu.back())) {
    refuse("draft_masks has " + std::to_string(inputs.draft_masks.size()) + " entries and num_drafts " +
           std::to_string(inputs.num_drafts.size()) + "; there is one of each per token, " + std::to_string(cu.back()) +
           ", and per request, " + std::to_string(inputs.seq_lens.size()) + ".");
  }
  for (size_t b = 0; b < inputs.seq_lens.size(); ++b) {
    const int q_len = cu[b + 1] - cu[b], count = inputs.num_drafts[b];
    if (count < 0 || count > kMaxDrafts || (count > 0 && count >= inputs.seq_lens[b])) {
      refuse("request " + std::to_string(b) + " has " + std::to_string(count) + " drafts among " +
             std::to_string(inputs.seq_lens[b]) + " keys; there are at most " + std::to_string(kMaxDrafts) +
             ", behind a token that is none.");
    }
    for (int q = 0; q < q_len; ++q) {
      const uint64_t mask = inputs.draft_masks[cu[b] + q];
      const int draft = q - (q_len - count);
      if (draft < 0 ? mask != 0 : static_cast<int>(std::bit_width(mask)) != draft + 1) {
        refuse("draft_masks[" + std::to_string(cu[b] + q) + "] is " + std::to_string(mask) +
               "; the last bit of a draft is its own, other tokens have none.");
      }
    }
  }
}

}  // namespace

void StepPlan::update(const StepInputs& inputs) {
  const auto& cu = inputs.cu_seqlens_q;
  const size_t num_requests = inputs.seq_lens.size();
  if (cu.size() != num_requests + 1) {
    refuse("cu_seqlens_q has " + std::to_string(cu.size()) + " entries, seq_lens has " + std::to_string(num_requests) +
           "; cu_seqlens_q must have one more.");
  }
  if (cu[0] != 0) refuse("cu_seqlens_q starts with " + std::to_string(cu[0]) + "; it must start with 0.");
  for (size_t b = 0; b < num_requests; ++b) {
    if (cu[b + 1] < cu[b]) {
      refuse("cu_seqlens_q falls from " + std::to_string(cu[b]) + " to " + std::to_string(cu[b + 1]) + " at request " +
             std::to_string(b) + ".");
    }
    if (inputs.seq_lens[b] < 0) {
      refuse("seq_lens is " + std::to_string(inputs.seq_lens[b]) + " at request " + std::to_string(b) + ".");
    }
  }
  check_drafts(inputs);
  inputs_ = inputs;
  num_tokens_ = cu.back();
  num_lists_ = 0;
}

// The earliest position among some queries of a request; those of drafts need not ascend.
int StepPlan::first_position(int request, int q_begin, int num_q) const {
  const int kv_len = inputs_.seq_lens[request];
  const int start = inputs_.cu_seqlens_q[request];
  const int q_len = inputs_.cu_seqlens_q[request + 1] - start;
  int first = kv_len - q_len + q_begin;
  if (inputs_.draft_masks.empty()) return first;
  const int newest = kv_len - inputs_.num_drafts[request] - 1;
  for (int q = q_begin; q < q_begin + num_q; ++q) {
    const uint64_t mask = inputs_.draft_masks[start + q];
    if (mask != 0) first = std::min(first, newest + std::popcount(mask));
  }
  return first;
}

const WorkList& StepPlan::work(const WorkShape& shape) {
  for (size_t i = 0; i < num_lists_; ++i) {
    if (lists_[i].shape == shape) return lists_[i];
  }
  check_blocks(shape);
  if (num_lists_ == lists_.size()) lists_.emplace_back();
  WorkList& list = lists_[num_lists_];
  list.shape = shape;
  fill(list);
  ++num_lists_;
  return list;
}

void StepPlan::check_blocks(const WorkShape& shape) const {
  for (int b = 0; b < num_requests(); ++b) {
    const int kv_len = inputs_.seq_lens[b];
    const int q_len = inputs_.cu_seqlens_q[b + 1] - inputs_.cu_seqlens_q[b];
    if (kv_len == 0 || q_len == 0) continue;
    const int64_t last = (kv_len - 1) / shape.block_size;
    if (last >= inputs_.max_blocks) {
      refuse("request " + std::to_string(b) + " has " + std::to_string(kv_len) + " keys, but its block table of " +
             std::to_string(inputs_.max_blocks) + " blocks holds " +
             std::to_string(inputs_.max_blocks * shape.block_size) + ".");
    }
    const int first_key = shape.sliding_window > 0 ? std::max(0, kv_len - q_len - shape.sliding_window + 1) : 0;
    const int32_t* table = inputs_.block_tables + b * inputs_.block_table_stride;
    for (int64_t i = first_key / shape.block_size; i <= last; ++i) {
      if (table[i] < 0 || table[i] >= shape.num_blocks) {
        throw std::out_of_range("block_tables[" + std::to_string(b) + ", " + std::to_string(i) + "] is " +
                                std::to_string(table[i]) + ", the cache has blocks 0 to " +
                                std::to_string(shape.num_blocks - 1) + ".");
      }
    }
  }
}

void StepPlan::fill(WorkList& list) const {
  const WorkShape& shape = list.shape;
  list.items.clear();
  list.num_splits = list.max_rows = 0;
  list.num_partial_rows = 0;
  list.has_tiles = false;
  list.cost_per_head = 0;
  for (int b = 0; b < num_requests(); ++b) {
    const int kv_len = inputs_.seq_lens[b];
    const int q_len = inputs_.cu_seqlens_q[b + 1] - inputs_.cu_seqlens_q[b];
    if (q_len == 0) continue;
    const bool few_rows = q_len * shape.group <= shape.rows_limit;
    const int tile = few_rows ? q_len : std::max(1, kMaxTileRows / shape.group);
    const int num_tiles = (q_len + tile - 1) / tile;
    // Equal tiles rather than a short last one.
    const int even_tile = (q_len + num_tiles - 1) / num_tiles;
    for (int q = 0; q < q_len; q += even_tile) {
      const int num_q = std::min(even_tile, q_len - q);
      const int rows = num_q * shape.group;
      // Query i of the request lies at key kv_len - q_len + i. Negative: before the first key, sees nothing.
      const int key_end = std::max(0, kv_len - q_len + q + num_q);
      const int key_begin =
          shape.sliding_window > 0 ? std::clamp(first_position(b, q, num_q) - shape.sliding_window + 1, 0, key_end) : 0;
      const int num_keys = key_end - key_begin;
      int part_keys = std::max(1, num_keys);
      if (few_rows) {
        part_keys = kRowsKeysPerPart;
      } else if (num_tiles * shape.num_kv_heads < kEnoughTiles) {
        part_keys = kTileKeysPerPart;
      }
      // A last part below half the size joins the one before.
      const int num_parts = std::max(1, (num_keys + part_keys / 2) / part_keys);
      const int split = num_parts > 1 ? list.num_splits++ : -1;
      for (int part = 0; part < num_parts; ++part) {
        const int begin = key_begin + part * part_keys;
        const int end = part + 1 == num_parts ? key_end : begin + part_keys;
        const double cost = item_cost(shape, rows, end - begin);
        list.items.push_back({b, q, num_q, begin, end, part, num_parts, split, list.num_partial_rows, few_rows, cost});
        if (num_parts > 1) list.num_partial_rows += rows;
        list.cost_per_head += cost;
      }
      list.max_rows = std::max(list.max_rows, rows);
      list.has_tiles |= !few_rows;
    }
  }
  std::stable_sort(list.items.begin(), list.items.end(),
                   [](const WorkItem& a, const WorkItem& b) { return a.cost > b.cost; });
}

float* StepPlan::partials(size_t num_floats) {
  if (partials_.size() < num_floats) partials_.resize(num_floats);
  return partials_.data();
}

std::atomic<int>* StepPlan::split_counters(size_t num_counters) {
  if (num_counters_ < num_counters) {
    counters_ = std::make_unique<std::atomic<int>[]>(num_counters);  // zeros since C++20
    num_counters_ = num_counters;
  }
  return counters_.get();
}

}  // namespace llmopt
