// The driver: splits a call into tasks, runs them on the team, merges parts and writes the output.
#include "llmopt/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "core/attention/kernels.h"
#include "llmopt/parallel.h"

namespace llmopt {
namespace attention {

const Kernels& kernels(Isa isa) {
  switch (isa) {
#if defined(LLMOPT_X86)
    case Isa::kAmx:
      return amx_kernels();
    case Isa::kAvx512Bf16:
      return avx512_bf16_kernels();
    case Isa::kAvx512:
      return avx512_kernels();
    case Isa::kAvx2:
      return avx2_kernels();
#endif
    default:
      return portable_kernels();
  }
}

}  // namespace attention

namespace {

using attention::Kernels;
using attention::Task;

// Below this a team of threads costs more than it saves.
constexpr double kMinParallelNs = 8000;
// Tasks at the end that a thread takes only when it can start them.
constexpr int64_t kLastTasks = 6;
constexpr float kLog2E = 1.44269504088896340736f;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Memory of one thread, kept between calls.
class Scratch {
 public:
  std::byte* at_least(size_t bytes) {
    if (bytes > size_) {
      memory_.reset(static_cast<std::byte*>(std::aligned_alloc(64, round_up(bytes, 64))));
      if (!memory_) throw std::bad_alloc();
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  size_t size_ = 0;
};

thread_local Scratch scratch;
thread_local Scratch rotated_query;  // of the thread that calls

bool has_row_tiles(const Kernels& kernels, const LayerCache& cache) {
  return kernels.attend_row_tiles_bf16 && cache.dtype == DType::kBFloat16 &&
         attention::row_tiles_fit(cache.block_size, cache.head_dim, cache.head_dim_v);
}

int rows_limit(const LayerCache& cache) {
  const Kernels& kernels = attention::kernels(selected_isa());
  if (has_row_tiles(kernels, cache)) return attention::kMaxTileRows;
  return cache.dtype == DType::kFloat32 ? kernels.rows_limit_f32 : kernels.rows_limit_bf16;
}

WorkShape work_shape(const AttentionArgs& args, const LayerCache& cache) {
  return {cache.num_kv_heads,
          args.num_heads / cache.num_kv_heads,
          cache.block_size,
          cache.num_blocks,
          cache.head_dim,
          cache.head_dim_v,
          cache.is_quantized ? 1 : static_cast<int>(item_size(cache.dtype)),
          args.sliding_window,
          rows_limit(cache)};
}

void check(const AttentionArgs& args, const LayerCache& cache, const StepPlan& plan) {
  if (args.head_dim != cache.head_dim) {
    throw std::invalid_argument("the query has head_dim " + std::to_string(args.head_dim) + ", the key cache has " +
                                std::to_string(cache.head_dim) + ".");
  }
  if (args.num_heads <= 0 || args.num_heads % cache.num_kv_heads != 0) {
    throw std::invalid_argument("the query has " + std::to_string(args.num_heads) + " heads, the key cache has " +
                                std::to_string(cache.num_kv_heads) + "; the first must be a multiple of the second.");
  }
  if (args.num_tokens < plan.num_tokens()) {
    throw std::invalid_argument("the query has " + std::to_string(args.num_tokens) + " tokens, the plan has " +
                                std::to_string(plan.num_tokens()) + ".");
  }
  if (!(args.scale >= 0) || args.sliding_window < 0 || !(args.softcap >= 0)) {
    throw std::invalid_argument("scale " + std::to_string(args.scale) + ", sliding_window " +
                                std::to_string(args.sliding_window) + ", softcap " + std::to_string(args.softcap) +
                                ": none may be negative.");
  }
}

}  // namespace

// What the tasks of a call share.
class AttentionCall::Impl {
 public:
  Impl(const AttentionArgs& args, const LayerCache& cache, StepPlan& plan)
      : args(args),
        cache(cache),
        inputs(plan.inputs()),
        work(plan.work(work_shape(args, cache))),
        kernels(attention::kernels(selected_isa())),
        partials(plan.partials(cache.num_kv_heads * work.num_partial_rows * (cache.head_dim_v + 2))),
        counters(plan.split_counters(static_cast<size_t>(work.num_splits) * cache.num_kv_heads)),
        row_tiles(has_row_tiles(kernels, cache)),
        scratch_bytes(task_scratch_bytes()) {
    const int64_t out_row_bytes = static_cast<int64_t>(args.num_heads) * cache.head_dim_v * item_size(cache.dtype);
    std::memset(static_cast<char*>(args.out) + plan.num_tokens() * out_row_bytes, 0,
                (args.num_tokens - plan.num_tokens()) * out_row_bytes);
  }

  int64_t num_tasks() const { return static_cast<int64_t>(work.items.size()) * cache.num_kv_heads; }
  double cost_ns() const { return work.cost_per_head * cache.num_kv_heads; }
  bool uses_tiles() const {
    return (work.has_tiles || row_tiles) && cache.dtype == DType::kBFloat16 && kernels.enter_tiles;
  }

  void run() {
    std::byte* memory = scratch.at_least(scratch_bytes);
    Task task = common_task(memory), next_task = task;
    int64_t i = take();
    if (i < num_tasks()) set_place(task, i);
    while (i < num_tasks()) {
      // The task after this one is taken early, so that its first keys can be fetched, except near the end, where
      // another thread may be free sooner.
      const bool is_early = next.load(std::memory_order_relaxed) + kLastTasks < num_tasks();
      int64_t following = num_tasks();
      if (is_early && (following = take()) < num_tasks()) {
        set_place(next_task, following);
        task.next = &next_task;
      }
      run_task(item_of(i), head_of(i), task);
      if (!is_early && (following = take()) < num_tasks()) set_place(next_task, following);
      std::swap(task, next_task);
      task.next = nullptr;
      i = following;
    }
  }

 private:
  int group() const { return work.shape.group; }
  int64_t partial_stride() const { return cache.head_dim_v + 2; }
  float* partial_row(int head, int64_t row) const {
    return partials + (head * work.num_partial_rows + row) * partial_stride();
  }

  size_t task_scratch_bytes() const {
    size_t workspace = kernels.workspace_bytes(work.max_rows, cache.head_dim, cache.head_dim_v);
    if (row_tiles) {
      workspace = std::max({workspace, kernels.row_tile_workspace_bytes(cache.head_dim),
                            kernels.column_tile_workspace_bytes(work.max_rows, cache.head_dim, cache.head_dim_v)});
    }
    return accumulator_bytes() + round_up(workspace, 64) + (cache.is_quantized ? unpacked_bytes() : 0);
  }
  int64_t accumulator_bytes() const {
    const int64_t row = round_up(cache.head_dim_v, attention::kColumnPadding) + 2;
    return round_up(round_up(work.max_rows, 32) * row * static_cast<int64_t>(sizeof(float)), 64);
  }
  int64_t unpacked_bytes() const {
    return (cache.head_dim + cache.head_dim_v) * static_cast<int64_t>(item_size(cache.dtype)) *
           attention::kMaxChunkKeys;
  }

  // Divide a finished row by its denominator and store it.
  void finish_row(const WorkItem& item, int head, int row, const float* accumulator, float max, float sum) const {
    const int query_head = head * group() + row % group();
    const int64_t token = inputs.cu_seqlens_q[item.request] + item.q_begin + row / group();
    float factor = sum > 0 || std::isnan(sum) ? 1 / sum : 0;
    if (args.sinks) {
      const float sink = args.sinks[query_head] * kLog2E;
      const float top = std::max(max, sink);
      const float rescale = max == -std::numeric_limits<float>::infinity() ? 0 : std::exp2(max - top);
      factor = rescale / (sum * rescale + std::exp2(sink - top));
    }
    const int64_t index = (token * args.num_heads + query_head) * cache.head_dim_v;
    if (cache.dtype == DType::kFloat32) {
      kernels.write_row_f32(accumulator, cache.head_dim_v, factor, static_cast<float*>(args.out) + index);
    } else {
      kernels.write_row_bf16(accumulator, cache.head_dim_v, factor, static_cast<uint16_t*>(args.out) + index);
    }
  }

  void merge(const WorkItem& item, int head, int rows, float* sum_row) const {
    const int64_t first = item.row - static_cast<int64_t>(item.part) * rows;
    const int dv = cache.head_dim_v;
    for (int r = 0; r < rows; ++r) {
      float max = -std::numeric_limits<float>::infinity(), sum = 0;
      for (int part = 0; part < item.num_parts; ++part) {
        max = std::max(max, partial_row(head, first + static_cast<int64_t>(part) * rows + r)[dv]);
      }
      std::fill_n(sum_row, dv, 0.0f);
      for (int part = 0; part < item.num_parts; ++part) {
        const float* row = partial_row(head, first + static_cast<int64_t>(part) * rows + r);
        if (row[dv] == -std::numeric_limits<float>::infinity()) continue;
        const float weight = std::exp2(row[dv] - max);
        sum += row[dv + 1] * weight;
        for (int i = 0; i < dv; ++i) sum_row[i] += row[i] * weight;
      }
      finish_row(item, head, r, sum_row, max, sum);
    }
  }

  int64_t take() { return next.fetch_add(1, std::memory_order_relaxed); }
  const WorkItem& item_of(int64_t task) const { return work.items[task / cache.num_kv_heads]; }
  int head_of(int64_t task) const { return static_cast<int>(task % cache.num_kv_heads); }

  // What the tasks of a thread share.
  Task common_task(std::byte* memory) const {
    Task task;
    task.query_token_stride = args.query_token_stride;
    task.query_head_stride = args.query_head_stride;
    task.group = group();
    task.block_size = cache.block_size;
    task.key_row_bytes = static_cast<int>(cache.key_row_bytes());
    task.value_row_bytes = static_cast<int>(cache.value_row_bytes());
    task.key_block_bytes = cache.key_row_bytes() * cache.num_kv_heads * cache.block_size;
    task.value_block_bytes = cache.value_row_bytes() * cache.num_kv_heads * cache.block_size;
    task.is_quantized = cache.is_quantized;
    task.head_dim = cache.head_dim;
    task.head_dim_v = cache.head_dim_v;
    task.sliding_window = args.sliding_window;
    task.scale = args.scale;
    task.softcap = args.softcap;
    const int64_t padded_rows = round_up(work.max_rows, 32);
    task.accumulator_stride = round_up(cache.head_dim_v, attention::kColumnPadding);
    task.accumulator = reinterpret_cast<float*>(memory);
    task.row_max = task.accumulator + padded_rows * task.accumulator_stride;
    task.row_sum = task.row_max + padded_rows;
    task.workspace = memory + accumulator_bytes();
    task.unpacked = cache.is_quantized ? memory + scratch_bytes - unpacked_bytes() : nullptr;
    return task;
  }

  void set_place(Task& task, int64_t index) const {
    const WorkItem& item = item_of(index);
    const int head = head_of(index);
    const auto size = static_cast<int64_t>(item_size(cache.dtype));
    const int64_t head_block = static_cast<int64_t>(cache.block_size) * head;
    const int64_t token = inputs.cu_seqlens_q[item.request] + item.q_begin;
    const int q_len = inputs.cu_seqlens_q[item.request + 1] - inputs.cu_seqlens_q[item.request];
    task.query = static_cast<const char*>(args.query) +
                 (token * args.query_token_stride + head * group() * args.query_head_stride) * size;
    task.num_q = item.num_q;
    task.first_position = inputs.seq_lens[item.request] - q_len + item.q_begin;
    const bool has_drafts = !inputs.draft_masks.empty() && inputs.num_drafts[item.request] > 0;
    task.draft_masks = has_drafts ? inputs.draft_masks.data() + token : nullptr;
    task.first_draft = has_drafts ? inputs.seq_lens[item.request] - inputs.num_drafts[item.request] : 0;
    task.block_table = inputs.block_tables + item.request * inputs.block_table_stride;
    task.key = static_cast<const std::byte*>(cache.key) + head_block * cache.key_row_bytes();
    task.value = static_cast<const std::byte*>(cache.value) + head_block * cache.value_row_bytes();
    task.key_begin = item.key_begin;
    task.key_end = item.key_end;
  }

  void run_task(const WorkItem& item, int head, const Task& task) const {
    const int rows = item.num_q * group();
    if (cache.dtype == DType::kFloat32) {
      (item.few_rows ? kernels.attend_rows_f32 : kernels.attend_tile_f32)(task);
    } else {
      const auto few_rows = row_tiles ? kernels.attend_row_tiles_bf16 : kernels.attend_rows_bf16;
      const auto many_rows = row_tiles ? kernels.attend_column_tiles_bf16 : kernels.attend_tile_bf16;
      (item.few_rows ? few_rows : many_rows)(task);
    }

    if (item.num_parts == 1) {
      for (int r = 0; r < rows; ++r) {
        finish_row(item, head, r, task.accumulator + r * task.accumulator_stride, task.row_max[r], task.row_sum[r]);
      }
      return;
    }
    for (int r = 0; r < rows; ++r) {
      float* to = partial_row(head, item.row + r);
      std::copy_n(task.accumulator + r * task.accumulator_stride, cache.head_dim_v, to);
      to[cache.head_dim_v] = task.row_max[r];
      to[cache.head_dim_v + 1] = task.row_sum[r];
    }
    // Whoever finishes last merges all parts, in their order, so the result does not depend on who was last.
    std::atomic<int>& done = counters[item.split * cache.num_kv_heads + head];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == item.num_parts) {
      done.store(0, std::memory_order_relaxed);
      merge(item, head, rows, task.accumulator);
    }
  }

  const AttentionArgs args;
  const LayerCache cache;
  const StepInputs& inputs;
  const WorkList& work;
  const Kernels& kernels;
  float* const partials;             // [num_kv_heads, num_partial_rows, head_dim_v + 2]: row, its max, its sum
  std::atomic<int>* const counters;  // [num_splits, num_kv_heads] parts that are done
  const bool row_tiles;              // tiles that read keys in place
  const size_t scratch_bytes;
  alignas(64) std::atomic<int64_t> next{0};  // first task that no thread has taken
};

AttentionCall::AttentionCall(const AttentionArgs& args, const LayerCache& cache, StepPlan& plan) {
  check(args, cache, plan);
  impl_ = std::make_unique<Impl>(args, cache, plan);
}

AttentionCall::~AttentionCall() = default;

void AttentionCall::run() { impl_->run(); }

bool AttentionCall::uses_tiles() const { return impl_->uses_tiles(); }

double AttentionCall::cost_ns() const { return impl_->cost_ns(); }

int64_t AttentionCall::num_tasks() const { return impl_->num_tasks(); }

double estimate_attention_ns(const AttentionArgs& args, const LayerCache& cache, StepPlan& plan) {
  check(args, cache, plan);
  return plan.work(work_shape(args, cache)).cost_per_head * cache.num_kv_heads;
}

namespace {

// The same call with a query that was rotated as the keys are, in memory of this thread.
AttentionArgs with_rotated_query(AttentionArgs args, const LayerCache& cache, int num_threads) {
  constexpr double kNsPerRow = 20;
  const attention::Kernels& kernels = attention::kernels(selected_isa());
  const bool is_float = cache.dtype == DType::kFloat32;
  const auto size = static_cast<int64_t>(item_size(cache.dtype));
  const int64_t dim = args.head_dim, num_rows = args.num_tokens * args.num_heads;
  const auto* from = static_cast<const std::byte*>(args.query);
  std::byte* to = rotated_query.at_least(num_rows * dim * size);
  parallel_team(num_rows * kNsPerRow < kMinParallelNs ? 1 : num_threads, [&](int thread, int team) {
    auto* row = reinterpret_cast<float*>(scratch.at_least(round_up(dim, attention::kColumnPadding) * sizeof(float)));
    for (int64_t i = num_rows * thread / team; i < num_rows * (thread + 1) / team; ++i) {
      const int64_t token = i / args.num_heads, head = i % args.num_heads;
      const void* at = from + (token * args.query_token_stride + head * args.query_head_stride) * size;
      (is_float ? kernels.rotate_row_f32 : kernels.rotate_row_bf16)(at, args.head_dim, row);
      (is_float ? kernels.write_row_f32 : kernels.write_row_bf16)(row, args.head_dim, 1, to + i * dim * size);
    }
  });
  args.query = to;
  args.query_token_stride = args.num_heads * dim;
  args.query_head_stride = dim;
  return args;
}

}  // namespace

void paged_attention(const AttentionArgs& given, const LayerCache& cache, StepPlan& plan, int num_threads) {
  check(given, cache, plan);
  const AttentionArgs args = cache.is_quantized ? with_rotated_query(given, cache, num_threads) : given;
  AttentionCall call(args, cache, plan);
  if (call.cost_ns() < kMinParallelNs) num_threads = 1;
  num_threads = static_cast<int>(std::clamp<int64_t>(call.num_tasks(), 1, std::max(1, num_threads)));
  const attention::Kernels& kernels = attention::kernels(selected_isa());
  const bool tiles = call.uses_tiles();
  parallel_team(num_threads, [&](int, int) {
    if (tiles) kernels.enter_tiles();
    call.run();
    if (tiles) kernels.leave_tiles();
  });
}

}  // namespace llmopt
