// Keys and values of single tokens that move to another place of the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmopt {

// The keys or the values of one layer: [num_blocks, num_heads, block_size] rows. The memory belongs to the caller.
struct TokenRows {
  std::byte* data;
  int64_t num_blocks;
  int64_t num_heads;
  int64_t row_bytes;
};

// Copies token sources[i] (block * block_size + offset) to targets[i] in each of `rows`, in this order.
// Throws std::invalid_argument when the lists differ in length, std::out_of_range for a place that does not exist;
// nothing is moved then.
void move_tokens(std::span<const TokenRows> rows, int64_t block_size, std::span<const int64_t> sources,
                 std::span<const int64_t> targets);

}  // namespace llmopt
