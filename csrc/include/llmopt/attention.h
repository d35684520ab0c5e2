// Attention of packed, ragged queries over paged keys and values, and the write of new keys and values.
#pragma once

#include <cstdint>
#include <memory>

#include "llmopt/layer_cache.h"
#include "llmopt/step_plan.h"

namespace llmopt {

// Strides count elements. T tokens, Hq query heads, D head_dim, Dv head_dim_v of the cache.
struct AttentionArgs {
  const void* query;  // [T, Hq, D], last dimension contiguous
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t num_tokens;  // T; rows past the last request of the plan become zeros
  int num_heads;       // Hq, a multiple of the cache's num_kv_heads
  int head_dim;
  void* out;           // [T, Hq, Dv], contiguous
  float scale;         // not negative
  int sliding_window;  // a query sees that many last keys, itself included; 0: all
  float softcap;       // score = tanh(score / softcap) * softcap; 0: off
  const float* sinks;  // [Hq] one more logit per head in the denominator, or nullptr
};

struct WriteKvArgs {
  const void* key;  // [T, Hkv, D], last dimension contiguous, dtype of the cache
  int64_t key_token_stride;
  int64_t key_head_stride;
  const void* value;  // [T, Hkv, Dv], last dimension contiguous, dtype of the cache
  int64_t value_token_stride;
  int64_t value_head_stride;
  int64_t num_tokens;  // T; tokens past the end of the plan's slot_mapping are not written
  int num_kv_heads;
  int head_dim;
  int head_dim_v;
};

// Softmax and accumulation in float32. In bfloat16 the probabilities of a tile of queries are rounded to bfloat16
// before they meet the values, as flash attention does: by the AVX512_BF16 kernels for many queries, by the AMX kernels
// for any number when block_size is a multiple of 16 and the head sizes are multiples of 32. Else they stay in float32.
// Throws std::invalid_argument when sizes do not fit the cache or the plan, std::out_of_range on a bad block id.
//
// For callers who have threads of their own:
//
//   AttentionCall call(args, cache, plan);   // one thread, and a barrier: queries, keys and values are in place
//   call.run();                              // each thread, and a barrier: the output is complete
//
// It is made in well under a microsecond once the plan has the split for layers of this shape, which the first call of
// a step makes; the query's contents are not read before run(). `plan` and what `args` and `cache` point to outlive it.
// Where the cache is quantized, the query comes rotated (llmopt/layer_cache.h); paged_attention does that itself.
// One call at a time per plan: they share its memory for partial results. Threads take tasks one after the other until
// none is left, so any number of them may run, and the result does not depend on it.
class AttentionCall {
 public:
  // Throws as paged_attention does.
  AttentionCall(const AttentionArgs& args, const LayerCache& cache, StepPlan& plan);
  ~AttentionCall();
  AttentionCall(const AttentionCall&) = delete;
  AttentionCall& operator=(const AttentionCall&) = delete;

  // Each thread once. Where uses_tiles(), the thread is inside of a TileScope.
  void run();

  bool uses_tiles() const;
  double cost_ns() const;  // rough time on one thread
  int64_t num_tasks() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// The same on the threads that the process already has.
void paged_attention(const AttentionArgs& args, const LayerCache& cache, StepPlan& plan, int num_threads);

// Throws std::invalid_argument when sizes do not fit the cache, std::out_of_range on a slot past its end; nothing is
// written then.
void write_kv(const WriteKvArgs& args, const LayerCache& cache, const StepPlan& plan, int num_threads);

// Rough time in ns of a call on one thread, to decide whether releasing a lock around it pays.
double estimate_attention_ns(const AttentionArgs& args, const LayerCache& cache, StepPlan& plan);
double estimate_write_ns(const WriteKvArgs& args, const LayerCache& cache);

}  // namespace llmopt
