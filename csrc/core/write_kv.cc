#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/attention/kernels.h"
#include "llmopt/attention.h"
#include "llmopt/parallel.h"

namespace llmopt {
namespace {

// Below this a team of threads costs more than it saves.
constexpr double kMinParallelNs = 20000;

struct Source {
  const char* data;
  int64_t token_stride, head_stride;  // bytes
  char* cache;
  int64_t row_bytes;  // in the cache
  int dim;
  void (*rotate)(const void* from, int n, float* to);     // null: rows stay as they are
  void (*quantize)(const void* from, int n, int8_t* to);  // null: rows are copied
};

void write_token(const Source& source, int64_t token, int64_t slot, int num_heads, int block_size) {
  const int64_t block = slot / block_size, offset = slot % block_size;
  const char* from = source.data + token * source.token_stride;
  thread_local std::vector<float> rotated;
  char* to = source.cache + (block * num_heads * block_size + offset) * source.row_bytes;
  for (int head = 0; head < num_heads; ++head) {
    if (source.rotate) {
      rotated.resize(source.dim);
      source.rotate(from, source.dim, rotated.data());
      source.quantize(rotated.data(), source.dim, reinterpret_cast<int8_t*>(to));
    } else if (source.quantize) {
      source.quantize(from, source.dim, reinterpret_cast<int8_t*>(to));
    } else {
      std::memcpy(to, from, source.row_bytes);
    }
    from += source.head_stride;
    to += block_size * source.row_bytes;
  }
}

}  // namespace

double estimate_write_ns(const WriteKvArgs& args, const LayerCache& cache) {
  constexpr double kBytesPerNs = 4;
  return args.num_tokens * cache.num_kv_heads *
         (20 + (cache.head_dim + cache.head_dim_v) * item_size(cache.dtype) / kBytesPerNs);
}

void write_kv(const WriteKvArgs& args, const LayerCache& cache, const StepPlan& plan, int num_threads) {
  if (args.num_kv_heads != cache.num_kv_heads || args.head_dim != cache.head_dim ||
      args.head_dim_v != cache.head_dim_v) {
    throw std::invalid_argument("new keys and values have (heads, head_dim, head_dim_v) = (" +
                                std::to_string(args.num_kv_heads) + ", " + std::to_string(args.head_dim) + ", " +
                                std::to_string(args.head_dim_v) + "), the cache has (" +
                                std::to_string(cache.num_kv_heads) + ", " + std::to_string(cache.head_dim) + ", " +
                                std::to_string(cache.head_dim_v) + ").");
  }
  const auto slots = plan.inputs().slot_mapping;
  if (static_cast<int64_t>(slots.size()) > args.num_tokens) {
    throw std::invalid_argument("slot_mapping has " + std::to_string(slots.size()) + " slots, there are " +
                                std::to_string(args.num_tokens) + " new tokens.");
  }
  const int64_t num_slots = cache.num_blocks * cache.block_size;
  for (size_t t = 0; t < slots.size(); ++t) {
    if (slots[t] >= num_slots) {
      throw std::out_of_range("slot_mapping[" + std::to_string(t) + "] is " + std::to_string(slots[t]) +
                              ", the cache has slots 0 to " + std::to_string(num_slots - 1) + ".");
    }
  }
  const auto size = static_cast<int64_t>(item_size(cache.dtype));
  const attention::Kernels& kernels = attention::kernels(selected_isa());
  const bool is_float = cache.dtype == DType::kFloat32;
  const auto rotate = !cache.is_quantized ? nullptr : is_float ? kernels.rotate_row_f32 : kernels.rotate_row_bf16;
  const auto quantize = !cache.is_quantized ? nullptr : is_float ? kernels.quantize_row_f32 : kernels.quantize_row_bf16;
  const Source key{static_cast<const char*>(args.key),
                   args.key_token_stride * size,
                   args.key_head_stride * size,
                   static_cast<char*>(cache.key),
                   cache.key_row_bytes(),
                   cache.head_dim,
                   rotate,
                   cache.is_quantized ? kernels.quantize_row_f32 : nullptr};
  const Source value{static_cast<const char*>(args.value),
                     args.value_token_stride * size,
                     args.value_head_stride * size,
                     static_cast<char*>(cache.value),
                     cache.value_row_bytes(),
                     cache.head_dim_v,
                     nullptr,
                     quantize};
  const auto count = static_cast<int64_t>(slots.size());
  if (estimate_write_ns(args, cache) < kMinParallelNs) num_threads = 1;
  parallel_team(num_threads, [&](int thread, int team) {
    for (int64_t t = count * thread / team; t < count * (thread + 1) / team; ++t) {
      if (slots[t] < 0) continue;
      write_token(key, t, slots[t], cache.num_kv_heads, cache.block_size);
      write_token(value, t, slots[t], cache.num_kv_heads, cache.block_size);
    }
  });
}

}  // namespace llmopt
