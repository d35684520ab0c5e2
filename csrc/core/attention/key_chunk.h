// Where the keys and values of a chunk lie, for kernels that read them in place.
#pragma once

#include "core/attention/kernels.h"
#include "core/attention/simd.h"

namespace llmopt::attention {
namespace {

// Groups of 16 keys that lie one after the other, as block_size is a multiple of 16 and `first` is one. Groups without
// a key inside [begin, end) repeat another one; nothing of them is used.
template <int kKeys>
struct KeyChunk {
  const uint16_t* keys[kKeys / 16];
  const uint16_t* values[kKeys / 16];
  int begin, end;  // the keys that count, from the first one of the chunk

  void locate(const Task& task, int first, int key_begin, int key_end) {
    begin = max(0, key_begin - first);
    end = min(kKeys, key_end - first);
    for (int i = 0; i < kKeys / 16; ++i) {
      const int key = i * 16 < end ? first + i * 16 : first;
      const int64_t id = task.block_table[key / task.block_size];
      const int64_t offset = key % task.block_size;
      keys[i] = static_cast<const uint16_t*>(task.key) + id * task.key_block_stride + offset * task.head_dim;
      values[i] = static_cast<const uint16_t*>(task.value) + id * task.value_block_stride + offset * task.head_dim_v;
    }
  }

  // Group i, to the cache.
  LLMOPT_INLINE void prefetch(const Task& task, int i) const {
    if (i * 16 >= end) return;
    const int key_bytes = 32 * task.head_dim, value_bytes = 32 * task.head_dim_v;
    const auto* key = reinterpret_cast<const char*>(keys[i]);
    const auto* value = reinterpret_cast<const char*>(values[i]);
    for (int at = 0; at < key_bytes; at += 64) __builtin_prefetch(key + at, 0, 2);
    for (int at = 0; at < value_bytes; at += 64) __builtin_prefetch(value + at, 0, 2);
  }
};

}  // namespace
}  // namespace llmopt::attention
