// How near linear() comes to the limits of the machine. For each workload and number of rows: time of one pass over all
// matrices, bytes of weights read per second, floating-point operations per second, and both as fractions of what a
// plain read loop over the same memory and a loop of multiplications in registers reach in the same run.
//
//   bench_linear [rows=1,4,8,32,1024] [threads=1,2] [format=bfloat16|float32|int8|int8_group:32|int4:32|int4m:32,...]
//                [model=smollm2|qwen|NxK,...]  (the number after ':' is the group size, m: with minimums)
//                [ms=200] [prefetch=4096] [tile_rows=5] [unpack_rows=80]   the last three replace those of
//                linear_tuning()
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "llmopt/isa.h"
#include "llmopt/linear.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#endif
#if defined(LLMOPT_X86)
#include <immintrin.h>
#endif

namespace llmopt {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Memory {
  explicit Memory(size_t bytes) : size((bytes + kHugePage - 1) / kHugePage * kHugePage) {
    data = static_cast<std::byte*>(std::aligned_alloc(kHugePage, size));
    if (data == nullptr) {
      std::fprintf(stderr, "no memory for %zu bytes\n", size);
      std::exit(1);
    }
#if defined(__linux__)
    madvise(data, size, MADV_HUGEPAGE);
#endif
  }
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  static constexpr size_t kHugePage = 2 << 20;
  size_t size;
  std::byte* data;
};

class Barrier {
 public:
  explicit Barrier(int size) : size_(size) {}
  void wait() {
    const int generation = generation_.load(std::memory_order_relaxed);
    if (count_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      count_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    while (generation_.load(std::memory_order_acquire) == generation) {
#if defined(LLMOPT_X86)
      _mm_pause();
#endif
    }
  }

 private:
  int size_;
  std::atomic<int> count_{0}, generation_{0};
};

// Run body(thread) on pinned threads until `milliseconds` have passed, at least three times; the fastest pass counts.
double time_passes(int num_threads, int milliseconds, const std::function<void(int, Barrier&)>& body) {
  Barrier barrier(num_threads);
  double best = 1e30;
  bool more = true;
  const auto work = [&](int thread) {
#if defined(__linux__)
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(thread, &cpus);
    pthread_setaffinity_np(pthread_self(), sizeof(cpus), &cpus);
#endif
    const auto begin = Clock::now();
    for (int pass = 0; more; ++pass) {
      barrier.wait();
      const auto start = Clock::now();
      body(thread, barrier);
      barrier.wait();
      if (thread == 0) {
        if (pass > 0) best = std::min(best, seconds_since(start));
        more = pass < 3 || seconds_since(begin) * 1e3 < milliseconds;
      }
      barrier.wait();
    }
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < num_threads; ++thread) threads.emplace_back(work, thread);
  for (std::thread& thread : threads) thread.join();
  return best;
}

#if defined(LLMOPT_X86)
__attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#endif
uint64_t sum_words(const std::byte* data, size_t bytes) {
  typedef uint64_t Words __attribute__((vector_size(64)));
  Words sum[4] = {};
  for (size_t offset = 0; offset + 256 <= bytes; offset += 256) {
    __builtin_prefetch(data + offset + 4096);
    __builtin_prefetch(data + offset + 4160);
    __builtin_prefetch(data + offset + 4224);
    __builtin_prefetch(data + offset + 4288);
    for (int i = 0; i < 4; ++i) {
      Words words;
      std::memcpy(&words, data + offset + i * 64, 64);
      sum[i] += words;
    }
  }
  uint64_t total = 0;
  for (int i = 0; i < 8; ++i) total += sum[0][i] + sum[1][i] + sum[2][i] + sum[3][i];
  return total;
}

std::atomic<uint64_t> sink;

// Bytes per second of reading this memory, each thread its own half.
double read_rate(const Memory& memory, int num_threads, int milliseconds) {
  const size_t share = memory.size / num_threads / 256 * 256;
  const double seconds = time_passes(
      num_threads, milliseconds, [&](int thread, Barrier&) { sink += sum_words(memory.data + thread * share, share); });
  return static_cast<double>(share * num_threads) / seconds;
}

#if defined(LLMOPT_X86)
__attribute__((target("amx-tile,amx-bf16"))) void multiply_tiles(const uint16_t* values, int count) {
  asm volatile("" : : "r"(values) : "memory");  // the tile intrinsics do not tell the compiler which memory they read
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, values, 64);
  _tile_loadd(5, values + 512, 64);
  _tile_loadd(6, values + 1024, 64);
  _tile_loadd(7, values + 1536, 64);
  for (int i = 0; i < count; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}
#endif

// Operations per second of bfloat16 tiles that stay in registers; 0 where there are none. The values are of either sign
// and many bit patterns: products of zeros draw less power, so the clock would be higher.
double tile_rate(int num_threads) {
#if defined(LLMOPT_X86)
  if (selected_isa() != Isa::kAmx) return 0;
  constexpr int kCount = 20000;
  std::vector<uint16_t> values(4 * 512);
  uint32_t state = 1;
  for (uint16_t& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<uint16_t>(0x3c80 | (state >> 16 & 0x807f));
  }
  const double seconds = time_passes(num_threads, 100, [&](int, Barrier&) {
    const TileScope tiles;
    multiply_tiles(values.data(), kCount);
  });
  return num_threads * kCount * 4.0 * 16 * 16 * 32 * 2 / seconds;
#else
  static_cast<void>(num_threads);
  return 0;
#endif
}

struct Layer {
  int64_t num_outputs, num_inputs;
  LinearOutput::Kind kind = LinearOutput::Kind::kStore;
};

struct Model {
  std::vector<Layer> layers;
  Model& add(int count, const std::vector<Layer>& block) {
    for (int i = 0; i < count; ++i) layers.insert(layers.end(), block.begin(), block.end());
    return *this;
  }
};

using Kind = LinearOutput::Kind;

Model named_model(const std::string& name) {
  if (name == "smollm2") {
    return Model()
        .add(30, {{960, 576}, {576, 576, Kind::kAdd}, {3072, 576, Kind::kGated}, {576, 1536, Kind::kAdd}})
        .add(1, {{49152, 576}});
  }
  if (name == "qwen") {  // a third of its layers
    return Model().add(9,
                       {{2048, 1536}, {1536, 1536, Kind::kAdd}, {17920, 1536, Kind::kGated}, {1536, 8960, Kind::kAdd}});
  }
  const size_t x = name.find('x');
  if (x == std::string::npos) {
    std::fprintf(stderr, "model '%s' is not known: smollm2, qwen or NxK\n", name.c_str());
    std::exit(1);
  }
  const Layer layer{std::atoll(name.c_str()), std::atoll(name.c_str() + x + 1),
                    name.back() == 'g' ? Kind::kGated : Kind::kStore};
  return Model().add(static_cast<int>(std::max<int64_t>(1, (128 << 20) / (layer.num_outputs * layer.num_inputs))),
                     {layer});
}

// Format, group size and minimums; the sizes of the matrix are left open.
MatrixShape named_format(const std::string& name) {
  const size_t colon = std::min(name.find(':'), name.size());
  const std::string base = name.substr(0, colon);
  MatrixShape shape;
  if (colon < name.size()) shape.group_size = std::atoi(name.c_str() + colon + 1);
  shape.has_minimum = base == "int4m";
  const std::map<std::string, WeightFormat> formats = {
      {"float32", WeightFormat::kFloat32}, {"bfloat16", WeightFormat::kBFloat16},
      {"int8", WeightFormat::kInt8},       {"int8_group", WeightFormat::kInt8Group},
      {"int4", WeightFormat::kInt4Group},  {"int4m", WeightFormat::kInt4Group}};
  if (!formats.count(base)) {
    std::fprintf(stderr, "format '%s' is not known\n", name.c_str());
    std::exit(1);
  }
  shape.format = formats.at(base);
  return shape;
}

void run(const std::string& name, const std::string& format, const std::vector<int>& all_rows,
         const std::vector<int>& all_threads, int milliseconds) {
  const Model model = named_model(name);
  std::vector<PackedMatrix> matrices;
  size_t bytes = 0;
  double operations = 0;  // per row
  int64_t widest = 0, deepest = 0;
  for (const Layer& layer : model.layers) {
    PackedMatrix matrix;
    matrix.shape = named_format(format);
    matrix.shape.num_outputs = layer.num_outputs;
    matrix.shape.num_inputs = layer.num_inputs;
    bytes += packed_bytes(matrix.shape);
    operations += 2.0 * layer.num_outputs * layer.num_inputs;
    widest = std::max(widest, layer.num_outputs);
    deepest = std::max(deepest, layer.num_inputs);
    matrices.push_back(matrix);
  }
  const Memory memory(bytes);
  auto* halves = reinterpret_cast<uint16_t*>(memory.data);
  for (size_t i = 0; i < memory.size / 2; ++i) {  // near 1/32, either sign; as float16 near 1
    halves[i] = static_cast<uint16_t>(0x3c80 | (i * 2654435761u >> 20 & 0x807f));
  }
  const std::byte* next = memory.data;
  for (PackedMatrix& matrix : matrices) {
    matrix.data = next;
    next += packed_bytes(matrix.shape);
  }

  for (int num_threads : all_threads) {
    const double reading = read_rate(memory, num_threads, milliseconds), tiles = tile_rate(num_threads);
    std::printf("%s %s, %.0f MB, %d thread(s), %s: reads %.1f GB/s, tiles %.2f TFLOP/s\n", name.c_str(), format.c_str(),
                bytes / 1e6, num_threads, llmopt::name(selected_isa()), reading / 1e9, tiles / 1e12);
    for (int rows : all_rows) {
      std::map<int64_t, InputBuffer> inputs;
      for (const Layer& layer : model.layers) {
        if (inputs.count(layer.num_inputs)) continue;
        InputBuffer& buffer = inputs[layer.num_inputs];
        buffer.resize(input_form(named_format(format), rows), rows, layer.num_inputs);
        std::vector<float> values(layer.num_inputs);
        for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 13) / 8 - 0.75f;
        for (int r = 0; r < rows; ++r) buffer.fill_row(r, values.data());
      }
      const Memory out(rows * std::min<int64_t>(widest, 4096) * sizeof(float));
      std::vector<LinearScratch> scratch(num_threads);
      const auto begin_of = [&](const PackedMatrix& matrix, int thread) {
        return matrix.shape.num_panels() / 2 * thread / num_threads * 2;
      };
      const auto end_of = [&](const PackedMatrix& matrix, int thread) {
        return thread + 1 == num_threads ? matrix.shape.num_panels() : begin_of(matrix, thread + 1);
      };
      const double seconds = time_passes(num_threads, milliseconds, [&](int thread, Barrier& barrier) {
        const TileScope tile_scope;
        for (size_t i = 0; i < matrices.size(); ++i) {
          const PackedMatrix& matrix = matrices[i];
          const Layer& layer = model.layers[i];
          // The head of a large batch: its logits are wanted for the last rows only.
          InputRows input = inputs.at(layer.num_inputs).rows();
          if (layer.num_outputs > 30000) input.num_rows = std::min<int64_t>(input.num_rows, 32);
          LinearOutput output;
          output.kind = layer.kind;
          output.out = out.data;
          output.row_stride = layer.num_outputs / (layer.kind == Kind::kGated ? 2 : 1);
          if (output.row_stride * input.num_rows * sizeof(float) > out.size) output.row_stride = 0;
          output.activation = layer.kind == Kind::kGated ? Activation::kSilu : Activation::kNone;
          linear(matrix, input, output, begin_of(matrix, thread), end_of(matrix, thread), scratch[thread]);
          const PackedMatrix& following = matrices[(i + 1) % matrices.size()];
          prefetch_panels(following, begin_of(following, thread), end_of(following, thread));
          barrier.wait();
        }
      });
      double done = operations * rows;
      for (const Layer& layer : model.layers) {
        if (layer.num_outputs > 30000) done -= 2.0 * layer.num_outputs * layer.num_inputs * std::max(0, rows - 32);
      }
      std::printf("  rows %4d: %8.3f ms  %5.1f GB/s = %3.0f %% of reading", rows, seconds * 1e3, bytes / seconds / 1e9,
                  100 * bytes / seconds / reading);
      std::printf("  %6.3f TFLOP/s", done / seconds / 1e12);
      if (tiles > 0) std::printf(" = %3.0f %% of tiles", 100 * done / seconds / tiles);
      std::printf("\n");
    }
  }
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

}  // namespace
}  // namespace llmopt

int main(int argc, char** argv) {
  std::map<std::string, std::string> options = {{"rows", "1,2,4,5,8,16,32,128,1024"},
                                                {"threads", "1,2"},
                                                {"format", "bfloat16"},
                                                {"model", "smollm2"},
                                                {"ms", "200"},
                                                {"prefetch", ""},
                                                {"tile_rows", ""},
                                                {"unpack_rows", ""}};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    if (equals == std::string::npos || !options.count(argument.substr(0, equals))) {
      std::fprintf(stderr, "unknown argument '%s'; the first lines of bench_linear.cc list them\n", argv[i]);
      return 1;
    }
    options[argument.substr(0, equals)] = argument.substr(equals + 1);
  }
  if (!options["prefetch"].empty()) llmopt::linear_tuning().prefetch_bytes = std::atoi(options["prefetch"].c_str());
  if (!options["tile_rows"].empty()) {
    llmopt::LinearTuning& tuning = llmopt::linear_tuning();
    tuning.tile_rows_bf16 = tuning.tile_rows_int8 = tuning.tile_rows_group = std::atoi(options["tile_rows"].c_str());
  }
  if (!options["unpack_rows"].empty()) llmopt::linear_tuning().unpack_rows = std::atoi(options["unpack_rows"].c_str());
  std::vector<int> rows, threads;
  for (const std::string& text : llmopt::split(options["rows"])) rows.push_back(std::atoi(text.c_str()));
  for (const std::string& text : llmopt::split(options["threads"])) threads.push_back(std::atoi(text.c_str()));
  for (const std::string& format : llmopt::split(options["format"])) {
    for (const std::string& model : llmopt::split(options["model"])) {
      llmopt::run(model, format, rows, threads, std::atoi(options["ms"].c_str()));
    }
  }
  return 0;
}
