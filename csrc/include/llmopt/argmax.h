// The best entry of each row of a matrix: the greedy choice of a token.
#pragma once

#include <cstdint>

namespace llmopt {

struct Best {
  int64_t index;  // first place of the largest value; of the first NaN where there is one
  float value;    // what stands there, NaN included, so that the caller sees it
};

// row: `size` values, size >= 1.
Best argmax(const float* row, int64_t size);

}  // namespace llmopt
