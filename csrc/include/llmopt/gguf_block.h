// Rows of a GGUF file's tensors. A quantized row is a sequence of blocks, each with its own parameters; how their bits
// lie is written at every format in gguf_block.cc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmopt/packed_matrix.h"

namespace llmopt {

// The numbers that GGUF files use. Other types exist, and are not read.
enum class GgufType : uint32_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ6_K = 14,
  kBFloat16 = 30,
};

struct GgufLayout {
  int block_values = 0;  // num_inputs is a multiple of it
  int block_bytes = 0;
  // The packed form that holds the values as they are; group_size 0: not quantized.
  WeightFormat format = WeightFormat::kFloat32;
  int group_size = 0;
  bool has_minimum = false;
};

// Throws std::invalid_argument for a type that is not listed above.
GgufLayout gguf_layout(GgufType type);

// A quantized row taken apart, as pack_quantized_panel wants it: w = scale * value (int8_group), scale * (value - 8),
// or scale * value + minimum (int4_group). values: [num_inputs]; scales and minimums: [num_inputs / group_size],
// minimums only for types that have them.
void decode_gguf_row(GgufType type, const std::byte* row, int64_t num_inputs, uint8_t* values, float* scales,
                     float* minimums);

// A row of any type as float32: [num_inputs]
void dequantize_gguf_row(GgufType type, const std::byte* row, int64_t num_inputs, float* out);

}  // namespace llmopt
