// Prints what a step of a decoder with random weights costs on this machine, and where the time goes. Not a test.
//
//   decoder_timing [threads] [float32|bfloat16|int8|int4] [small|1.5b] [context] [rows ...]
//
// With rows: one request that has so many new tokens, whose best tokens are all wanted, as when drafts are verified.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "llmopt/decoder.h"

namespace {

using namespace llmopt;

struct Sizes {
  int hidden, heads, kv_heads, dim, inner, layers;
  int64_t vocab;
};

constexpr Sizes kSmall = {576, 9, 3, 64, 1536, 30, 49152};      // SmolLM2-135M
constexpr Sizes kLarge = {1536, 12, 2, 128, 8960, 28, 151936};  // Qwen2.5-1.5B

// Zeros on huge pages. Lives until the end of the program.
std::byte* allocate(size_t bytes) {
  constexpr size_t kHugePage = 2 << 20;
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* memory = std::aligned_alloc(kHugePage, bytes);
  if (!memory) std::abort();
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 0, bytes);
  return static_cast<std::byte*>(memory);
}

PackedMatrix matrix(WeightFormat format, int64_t outputs, int64_t inputs) {
  static const std::vector<float> pool = [] {
    std::vector<float> values(1 << 16);
    std::mt19937 random(1);
    for (float& x : values) x = std::normal_distribution<float>(0, 0.03f)(random);
    return values;
  }();
  static size_t next = 0;
  MatrixShape shape{format, outputs, inputs, 0, false};
  if (format == WeightFormat::kInt4Group) shape.group_size = 32;
  std::byte* data = allocate(packed_bytes(shape));
  for (int64_t panel = 0; panel < shape.num_panels(); ++panel) {
    SourceRows rows;
    for (auto& row : rows.rows) row = pool.data() + (next += 7919) % (pool.size() - inputs);
    pack_panel(shape, rows, data + panel * panel_bytes(shape));
  }
  return {shape, data};
}

const float* filled(int64_t n, float value) {
  auto* values = reinterpret_cast<float*>(allocate(n * sizeof(float)));
  std::fill_n(values, n, value);
  return values;
}

DecoderSpec make_spec(const Sizes& s, WeightFormat format, int64_t num_positions, double* bytes) {
  const auto count = [&](PackedMatrix made) {
    *bytes += static_cast<double>(packed_bytes(made.shape));
    return made;
  };
  const NormSpec norm{NormKind::kRms, filled(s.hidden, 1), nullptr, 1e-5f};
  DecoderSpec spec;
  spec.hidden_size = s.hidden;
  spec.vocab_size = s.vocab;
  spec.embedding = count(matrix(format, s.vocab, s.hidden));
  spec.head.weight = spec.embedding;
  spec.final_norm = norm;
  spec.ropes.push_back(
      {filled(num_positions * s.dim / 2, 0.6f), filled(num_positions * s.dim / 2, 0.8f), num_positions, s.dim, false});
  for (int i = 0; i < s.layers; ++i) {
    LayerSpec layer;
    layer.before_attention = layer.before_mlp = norm;
    layer.attention.num_heads = s.heads;
    layer.attention.num_kv_heads = s.kv_heads;
    layer.attention.head_dim = s.dim;
    layer.attention.qkv.weight = count(matrix(format, (s.heads + 2 * s.kv_heads) * s.dim, s.hidden));
    layer.attention.output.weight = count(matrix(format, s.hidden, s.heads * s.dim));
    layer.attention.rope = 0;
    layer.attention.scale = 1 / std::sqrt(static_cast<float>(s.dim));
    layer.mlp.up.weight = count(matrix(format, 2 * s.inner, s.hidden));
    layer.mlp.down.weight = count(matrix(format, s.hidden, s.inner));
    spec.layers.push_back(layer);
  }
  return spec;
}

// `num_requests` requests of `num_new` new tokens each, after `context` tokens.
void time_step(Decoder& decoder, const char* what, int num_requests, int num_new, int context, double weight_bytes,
               bool wants_all = false) {
  constexpr int kBlockSize = 32;
  const int length = context + num_new, blocks = (length + kBlockSize - 1) / kBlockSize;
  std::vector<int32_t> tables, seq_lens(num_requests, length), cu_seqlens{0};
  std::vector<int64_t> tokens, positions, slots, wanted;
  for (int r = 0; r < num_requests; ++r) {
    for (int i = 0; i < blocks; ++i) tables.push_back(r * blocks + i);
    for (int i = 0; i < num_new; ++i) {
      if (wants_all || i == num_new - 1) wanted.push_back(static_cast<int64_t>(tokens.size()));
      tokens.push_back((r * 131 + i * 17) % decoder.spec().vocab_size);
      positions.push_back(context + i);
      slots.push_back(static_cast<int64_t>(r) * blocks * kBlockSize + context + i);
    }
    cu_seqlens.push_back(static_cast<int32_t>(tokens.size()));
  }
  std::vector<int64_t> best(wanted.size());
  StepPlan plan;
  const auto run = [&] {
    plan.update({tables.data(), blocks, blocks, seq_lens, cu_seqlens, slots});
    decoder.step({tokens, positions, wanted, nullptr, best.data(), nullptr}, plan);
  };
  const auto time = [&](double budget_s) {
    std::vector<double> times;
    for (double sum = 0; sum < budget_s || times.size() < 3; sum += times.back()) {
      const auto start = std::chrono::steady_clock::now();
      run();
      times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    std::sort(times.begin(), times.end());
    return times;
  };
  run();
  const std::vector<double> times = time(0.6);
  const double median = times[times.size() / 2];
  std::printf("%-14s %8.3f ms (best %.3f)  %9.0f rows/s  %6.1f GB/s of weights\n", what, median * 1e3, times[0] * 1e3,
              num_requests * num_new / median, weight_bytes / median / 1e9);
  decoder.set_profiling(true);
  const auto profiled = time(0.3);
  std::printf("   ");
  for (const auto& [phase, seconds] : decoder.profile()) {
    std::printf(" %s %.3f", phase, seconds * 1e3 / static_cast<double>(profiled.size()));
  }
  std::printf("  (ms)\n");
  decoder.set_profiling(false);
}

}  // namespace

int main(int argc, char** argv) {
  const int num_threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const std::string wanted = argc > 2 ? argv[2] : "bfloat16";
  const Sizes sizes = argc > 3 && std::string(argv[3]) == "1.5b" ? kLarge : kSmall;
  const int context = argc > 4 ? std::atoi(argv[4]) : 64;
  const WeightFormat format = wanted == "float32" ? WeightFormat::kFloat32
                              : wanted == "int8"  ? WeightFormat::kInt8
                              : wanted == "int4"  ? WeightFormat::kInt4Group
                                                  : WeightFormat::kBFloat16;
  const DType dtype = format == WeightFormat::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
  double weight_bytes = 0;
  const int64_t num_positions = context + 2048, num_blocks = 32 * ((context + 64) / 32 + 1) + 64;
  const DecoderSpec spec = make_spec(sizes, format, num_positions, &weight_bytes);
  std::vector<LayerCache> caches;
  const size_t cache_bytes = num_blocks * 32 * sizes.kv_heads * sizes.dim * item_size(dtype);
  for (int i = 0; i < sizes.layers; ++i) {
    std::byte *key = allocate(cache_bytes), *value = allocate(cache_bytes);
    caches.push_back({key, value, num_blocks, sizes.kv_heads, 32, sizes.dim, sizes.dim, dtype});
  }
  Decoder decoder(spec, caches, std::make_shared<ThreadTeam>(ThreadTeamOptions{num_threads, {}, true, 200}));
  std::printf("%s, %d threads, %.0f MB of weights, context %d\n", name(format), num_threads, weight_bytes / 1e6,
              context);
  for (int i = 5; i < argc; ++i) {
    const int rows = std::atoi(argv[i]);
    time_step(decoder, ("verify " + std::string(argv[i])).c_str(), 1, rows, context, weight_bytes, true);
  }
  if (argc > 5) return 0;
  time_step(decoder, "1 row", 1, 1, context, weight_bytes);
  time_step(decoder, "4 rows", 4, 1, context, weight_bytes);
  time_step(decoder, "8 rows", 8, 1, context, weight_bytes);
  time_step(decoder, "32 rows", 32, 1, context, weight_bytes);
  time_step(decoder, "verify 8", 1, 8, context, weight_bytes);
  time_step(decoder, "prefill 256", 1, 256, 0, weight_bytes);
  time_step(decoder, "prefill 1024", 1, 1024, 0, weight_bytes);
}
