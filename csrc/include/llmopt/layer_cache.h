// Keys and values of one layer, in blocks.
#pragma once

#include <cstdint>

#include "llmopt/dtype.h"

namespace llmopt {

// The memory belongs to the caller and outlives this object.
struct LayerCache {
  void* key;    // [num_blocks, num_kv_heads, block_size, head_dim], contiguous
  void* value;  // [num_blocks, num_kv_heads, block_size, head_dim_v], contiguous
  int64_t num_blocks;
  int num_kv_heads;
  int block_size;
  int head_dim;
  int head_dim_v;
  DType dtype;  // of both, and of queries, new keys and outputs
};

}  // namespace llmopt
