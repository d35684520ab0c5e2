// Panels from weights that are quantized already, such as the blocks of a GGUF file: nothing is rounded again except
// the parameters, which are stored as float16 (most come from float16; a product of two parameters may round).
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmopt/packed_matrix.h"

namespace llmopt {

// One panel's worth of rows. A null row becomes zeros.
struct QuantizedRows {
  // [num_inputs] per row. kInt4Group: 0..15. kInt8Group: the bytes of int8 values, -128..127.
  const uint8_t* values[kPanelWidth] = {};
  // [ceil(num_inputs / group_size)] per row
  const float* scales[kPanelWidth] = {};
  // The same, for shapes with minimums; otherwise null.
  const float* minimums[kPanelWidth] = {};
};

// Store kInt8Group and kInt4Group values as they are: w = scale * value (int8), scale * (value - 8) (int4), or
// scale * value + minimum (int4 with minimums).
// Throws std::invalid_argument for other formats and for shapes that no kernel reads.
void pack_quantized_panel(const MatrixShape& shape, const QuantizedRows& source, std::byte* panel);

}  // namespace llmopt
