// Keys and values of one layer, in blocks.
#pragma once

#include <cstdint>

#include "llmopt/dtype.h"

namespace llmopt {

// Bytes behind the int8 values of a quantized row: their scale, a bfloat16. value[i] = scale * row[i].
inline constexpr int kScaleBytes = 2;

// The memory belongs to the caller and outlives this object. A row is what a token has for one head: head_dim elements,
// or where the cache is quantized head_dim int8 values and their scale.
//
// The keys of a quantized cache are rotated before they are rounded, and so are the queries that meet them, which
// leaves their products as they were. The rotation is an orthonormal Hadamard matrix, of the largest power of two that
// divides head_dim, for each group of so many elements. It spreads channels that are much larger than the others, and
// would set the scale of all, over the group. It is its own inverse.
struct LayerCache {
  void* key;    // [num_blocks, num_kv_heads, block_size] rows of head_dim, contiguous
  void* value;  // [num_blocks, num_kv_heads, block_size] rows of head_dim_v, contiguous
  int64_t num_blocks;
  int num_kv_heads;
  int block_size;
  int head_dim;
  int head_dim_v;
  DType dtype;                // of queries, new keys and values and outputs, and of rows that are not quantized
  bool is_quantized = false;  // rows are int8

  int64_t row_bytes(int dim) const {
    return is_quantized ? dim + kScaleBytes : dim * static_cast<int64_t>(item_size(dtype));
  }
  int64_t key_row_bytes() const { return row_bytes(head_dim); }
  int64_t value_row_bytes() const { return row_bytes(head_dim_v); }
};

}  // namespace llmopt
