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
    int block = first / task.block_size, offset = first % task.block_size;
    for (int i = 0; i < kKeys / 16; ++i) {
      if (i > 0 && i * 16 >= end) {
        keys[i] = keys[0];
        values[i] = values[0];
        continue;
      }
      const int64_t id = task.block_table[block];
      keys[i] = static_cast<const uint16_t*>(task.key) + id * task.key_block_stride + offset * task.head_dim;
      values[i] = static_cast<const uint16_t*>(task.value) + id * task.value_block_stride + offset * task.head_dim_v;
      offset += 16;
      if (offset == task.block_size) {
        offset = 0;
        ++block;
      }
    }
  }
};

}  // namespace
}  // namespace llmopt::attention
