// Packing of each format, and what they share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "llmopt/packed_matrix.h"

namespace llmopt::matmul {

inline float bfloat16_to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Round to nearest, ties to even; NaN keeps its upper half and stays quiet.
inline uint16_t float_to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Row `row` of the source as float32: [num_inputs]. A null row gives zeros.
void read_row(const SourceRows& source, int row, int64_t num_inputs, float* out);

// The integer formats (pack_int.cc). `column` is a column of the panel.
void pack_panel_int(const MatrixShape& shape, const SourceRows& source, std::byte* panel);
void unpack_column_int(const MatrixShape& shape, const std::byte* panel, int column, float* out);

}  // namespace llmopt::matmul
