// Prints what decode attention over a long context takes, next to a plain read of the same keys and values, and what
// prefill attention takes: attention_timing [num_threads] [huge pages: 0 or 1] [block_size] [decode, short, draft,
// prefill or chunk]
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "llmopt/attention.h"
#include "llmopt/linear.h"
#include "llmopt/thread_team.h"

using namespace llmopt;
using Clock = std::chrono::steady_clock;

constexpr double kSeconds = 0.5;  // of one line

namespace {

struct Shape {
  const char* name;
  int num_layers, num_heads, num_kv_heads, head_dim;
};

// `count` requests that are alike.
struct Requests {
  int count, num_new, num_tokens;
};

// bfloat16 values around 1, so that no exponential is out of the ordinary.
class Memory {
 public:
  Memory(size_t bytes, bool huge) : bytes_(bytes) {
    data_ = static_cast<char*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (data_ == MAP_FAILED) std::abort();
    madvise(data_, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    std::mt19937 random(1);
    auto* words = reinterpret_cast<uint32_t*>(data_);
    for (size_t i = 0; i < bytes / 4; ++i) words[i] = (random() & 0x80ff80ff) | 0x3e003e00;
  }
  ~Memory() { munmap(data_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() const { return data_; }

 private:
  char* data_;
  size_t bytes_;
};

typedef long long Words __attribute__((vector_size(64)));

__attribute__((target("avx512f"))) int64_t read_all(const char* from, size_t bytes) {
  Words sum[8] = {};
  for (size_t i = 0; i + 512 <= bytes; i += 512) {
    for (int j = 0; j < 8; ++j) {
      __builtin_prefetch(from + i + 64 * j + 4096, 0, 3);
      sum[j] ^= *reinterpret_cast<const Words*>(from + i + 64 * j);
    }
  }
  for (int j = 1; j < 8; ++j) sum[0] ^= sum[j];
  return sum[0][0];
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void time_step(const Shape& shape, const std::vector<Requests>& batch, int block_size, bool huge, bool scattered,
               ThreadTeam& team) {
  std::vector<int32_t> seq_lens, cu = {0};
  int max_blocks = 0, num_blocks = 0;
  for (const Requests& requests : batch) {
    const int blocks_each = (requests.num_tokens + block_size - 1) / block_size;
    max_blocks = std::max(max_blocks, blocks_each);
    num_blocks += requests.count * blocks_each;
    for (int i = 0; i < requests.count; ++i) {
      seq_lens.push_back(requests.num_tokens);
      cu.push_back(cu.back() + requests.num_new);
    }
  }
  const size_t layer_bytes =
      static_cast<size_t>(num_blocks) * block_size * shape.num_kv_heads * shape.head_dim * sizeof(uint16_t);
  const size_t kv_bytes = 2 * layer_bytes * shape.num_layers;
  Memory memory(kv_bytes, huge);
  std::vector<LayerCache> caches;
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    char* key = memory.data() + 2 * layer * layer_bytes;
    caches.push_back({key, key + layer_bytes, num_blocks, shape.num_kv_heads, block_size, shape.head_dim,
                      shape.head_dim, DType::kBFloat16});
  }
  std::vector<int32_t> ids(num_blocks), tables(seq_lens.size() * max_blocks);
  std::iota(ids.begin(), ids.end(), 0);
  if (scattered) std::shuffle(ids.begin(), ids.end(), std::mt19937(2));
  for (size_t b = 0, id = 0; b < seq_lens.size(); ++b) {
    const int count = (seq_lens[b] + block_size - 1) / block_size;
    std::copy_n(ids.begin() + id, count, tables.begin() + b * max_blocks);
    id += count;
  }
  StepInputs inputs;
  inputs.block_tables = tables.data();
  inputs.block_table_stride = inputs.max_blocks = max_blocks;
  inputs.seq_lens = seq_lens;
  inputs.cu_seqlens_q = cu;
  const int64_t row = static_cast<int64_t>(shape.num_heads) * shape.head_dim;
  const int64_t num_tokens = cu.back();
  Memory query(num_tokens * row * 2, huge), out(num_tokens * row * 2, huge);
  AttentionArgs args{};
  args.query = query.data();
  args.query_token_stride = row;
  args.query_head_stride = shape.head_dim;
  args.num_tokens = num_tokens;
  args.num_heads = shape.num_heads;
  args.head_dim = shape.head_dim;
  args.out = out.data();
  args.scale = 0.125f;

  StepPlan plan;
  std::vector<double> attention, read;
  int64_t sink = 0;
  const Clock::time_point begin = Clock::now();
  for (int round = 0; round < 100 && (round < 5 || seconds_since(begin) < kSeconds); ++round) {
    Clock::time_point start = Clock::now();
    plan.update(inputs);
    std::unique_ptr<AttentionCall> call;
    team.run([&](int thread, int) {
      TileScope tiles;
      for (const LayerCache& cache : caches) {
        if (thread == 0) call = std::make_unique<AttentionCall>(args, cache, plan);
        team.barrier();
        call->run();
        team.barrier();
      }
    });
    attention.push_back(seconds_since(start));
    start = Clock::now();
    team.run([&](int thread, int size) {
      for (size_t layer = 0; layer < caches.size(); ++layer) {
        const size_t part = 2 * layer_bytes / size / 512 * 512;
        sink ^= read_all(memory.data() + 2 * layer * layer_bytes + thread * part, part);
        team.barrier();
      }
    });
    read.push_back(seconds_since(start));
  }
  std::string what;
  for (const Requests& requests : batch) {
    what += (what.empty() ? "" : " + ") + std::to_string(requests.count) + " of " + std::to_string(requests.num_new) +
            " at " + std::to_string(requests.num_tokens);
  }
  std::printf("%-8s %-28s %s blocks, %s pages, %6.1f MB: attention %7.3f ms, read %7.3f ms (%.1f GB/s), ratio %.2f%s\n",
              shape.name, what.c_str(), scattered ? "scattered" : "ordered", huge ? "huge" : "small",
              static_cast<double>(kv_bytes) / 1e6, median(attention) * 1e3, median(read) * 1e3,
              static_cast<double>(kv_bytes) / median(read) / 1e9, median(attention) / median(read),
              sink == 1 ? " " : "");
}

}  // namespace

int main(int argc, char** argv) {
  ThreadTeamOptions options;
  options.num_threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const bool huge = argc > 2 ? std::atoi(argv[2]) != 0 : true;
  const int block_size = argc > 3 ? std::atoi(argv[3]) : 32;
  ThreadTeam team(options);
  const std::string only = argc > 4 ? argv[4] : "";
  auto wanted = [&](const char* kind) { return only.empty() || only == kind; };
  const Shape smollm{"smollm2", 30, 9, 3, 64}, qwen{"qwen1.5b", 28, 12, 2, 128};
  for (const Shape& shape : {smollm, qwen}) {
    if (wanted("decode")) {
      for (bool scattered : {false, true}) {
        for (int batch : {1, 8}) time_step(shape, {{batch, 1, 4096}}, block_size, huge, scattered, team);
      }
    }
    if (wanted("short")) {
      for (int batch : {8, 32}) time_step(shape, {{batch, 1, 64}}, block_size, huge, false, team);
      for (int context : {64, 256, 1024}) time_step(shape, {{1, 1, context}}, block_size, huge, false, team);
    }
    if (wanted("draft")) {
      for (int q_len : {4, 8, 16}) time_step(shape, {{1, q_len, 4096}}, block_size, huge, false, team);
    }
    if (wanted("prefill")) {
      time_step(shape, {{1, 1024, 1024}}, block_size, huge, false, team);
      time_step(shape, {{1, 512, 2560}}, block_size, huge, false, team);
    }
    if (wanted("chunk")) {
      for (int context : {512, 2048, 3900}) {
        for (int num_new : {16, 32, 64, 128, 512}) {
          time_step(shape, {{1, num_new, context}}, block_size, huge, false, team);
        }
      }
      const Requests decodes{16, 1, 512};
      time_step(shape, {decodes}, block_size, huge, false, team);
      for (int num_new : {16, 64}) {
        time_step(shape, {decodes, {1, num_new, 3900}}, block_size, huge, false, team);
      }
    }
  }
}
