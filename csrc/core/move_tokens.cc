#include "llmopt/move_tokens.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace llmopt {

void move_tokens(std::span<const TokenRows> rows, int64_t block_size, std::span<const int64_t> sources,
                 std::span<const int64_t> targets) {
  if (sources.size() != targets.size()) {
    throw std::invalid_argument(std::to_string(sources.size()) + " tokens to move to " +
                                std::to_string(targets.size()) + " places.");
  }
  for (const TokenRows& layer : rows) {
    for (const auto& places : {sources, targets}) {
      for (const int64_t place : places) {
        if (place < 0 || place >= layer.num_blocks * block_size) {
          throw std::out_of_range("a token in place " + std::to_string(place) + ", the cache has places 0 to " +
                                  std::to_string(layer.num_blocks * block_size - 1) + ".");
        }
      }
    }
  }
  for (const TokenRows& layer : rows) {
    const int64_t head_bytes = block_size * layer.row_bytes;
    const auto row = [&](int64_t place) {
      return layer.data + place / block_size * layer.num_heads * head_bytes + place % block_size * layer.row_bytes;
    };
    for (size_t i = 0; i < sources.size(); ++i) {
      const std::byte* from = row(sources[i]);
      std::byte* to = row(targets[i]);
      if (from == to) continue;
      for (int64_t head = 0; head < layer.num_heads; ++head, from += head_bytes, to += head_bytes) {
        std::memcpy(to, from, layer.row_bytes);
      }
    }
  }
}

}  // namespace llmopt
