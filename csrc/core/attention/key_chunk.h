// Where the keys and values of a chunk lie, for kernels that read them in place.
#pragma once

#include "core/attention/kernels.h"
#include "core/attention/quantized_rows.h"
#include "core/attention/simd.h"

namespace llmopt::attention {
namespace {

// Groups of 16 keys that lie one after the other, as block_size is a multiple of 16 and `first` is one. Groups without
// a key inside [begin, end) repeat another one; nothing of them is used.
template <int kKeys>
struct KeyChunk {
  static_assert(kKeys <= kMaxChunkKeys);
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
      keys[i] = reinterpret_cast<const uint16_t*>(task.key + id * task.key_block_bytes +
                                                  offset * static_cast<int64_t>(task.key_row_bytes));
      values[i] = reinterpret_cast<const uint16_t*>(task.value + id * task.value_block_bytes +
                                                    offset * static_cast<int64_t>(task.value_row_bytes));
      offset += 16;
      if (offset == task.block_size) {
        offset = 0;
        ++block;
      }
    }
  }

  // Where the cache is quantized, what was located is rows of int8: put them into the scratch memory of the task, of
  // which one chunk at a time has the use.
  void unpack(const Task& task) {
    if (!task.is_quantized) return;
    auto* to = static_cast<uint16_t*>(task.unpacked);
    const auto put = [&](const uint16_t** groups, int dim, int row_bytes) {
      for (int i = 0; i < kKeys / 16; ++i) {
        if (i > 0 && i * 16 >= end) {
          groups[i] = groups[0];
          continue;
        }
        const auto* row = reinterpret_cast<const int8_t*>(groups[i]);
        groups[i] = to;
        for (int j = 0; j < 16; ++j, row += row_bytes, to += dim) dequantize_row<BFloat16>(row, dim, to);
      }
    };
    put(keys, task.head_dim, task.key_row_bytes);
    put(values, task.head_dim_v, task.value_row_bytes);
  }
};

}  // namespace
}  // namespace llmopt::attention
