// Where the parts of an integer panel lie. All three formats store unsigned values, quads of k for 16 columns a row:
//
//   row of quads, 64 bytes:  column 0: k k+1 k+2 k+3 | column 1: k k+1 k+2 k+3 | ... | column 15
//
// kInt8       [K/4] rows, then 16 float32 scales.                         w = scale * (q - 128)
// kInt8Group  [group/4] rows per group, float16 scales.                   w = scale * (q - 128)
// kInt4Group  [group/8] rows per group, each two rows of quads in one:    w = scale * (q - 8) or scale * q + minimum
//             low nibbles quad 2i, high nibbles quad 2i + 1; float16 scales, minimums
//
// Groups come in chunks of whole cache lines, so that a panel is one stream:
//   without minimum   [values of group g][values of g + 1][16 scales of g][16 scales of g + 1]
//   with minimum      [values of group g][16 scales][16 minimums]
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmopt/packed_matrix.h"

namespace llmopt::matmul::integer {
namespace {  // kernel sources include this, each with its own compiler flags

constexpr int kZero8 = 128;
constexpr int kZero4 = 8;
constexpr int kInputGroup = 32;  // values of x that share a scale in InputForm::kInt8Group
constexpr int kParameterBytes = 2 * kPanelWidth;

struct GroupLayout {
  int64_t num_groups = 0;
  int64_t value_bytes = 0;    // of one group
  int chunk_groups = 0;       // groups in a chunk; the last chunk may have fewer
  int64_t minimum_bytes = 0;  // from the scales of a group to its minimums; 0: none

  explicit GroupLayout(const MatrixShape& shape)
      : num_groups(padded_inputs(shape) / shape.group_size),
        value_bytes(shape.group_size * (shape.format == WeightFormat::kInt4Group ? 8 : 16)),
        chunk_groups(shape.has_minimum ? 1 : 2),
        minimum_bytes(shape.has_minimum ? kParameterBytes : 0) {}

  int64_t chunk_bytes() const { return chunk_groups * value_bytes + 64; }
  int64_t num_chunks() const { return (num_groups + chunk_groups - 1) / chunk_groups; }
  int64_t panel_bytes() const { return num_groups * value_bytes + num_chunks() * 64; }
  int64_t values(int64_t group) const {
    return group / chunk_groups * chunk_bytes() + group % chunk_groups * value_bytes;
  }
  int64_t scales(int64_t group) const {
    const int64_t chunk = group / chunk_groups, begin = chunk * chunk_groups;
    const int64_t in_chunk = begin + chunk_groups <= num_groups ? chunk_groups : num_groups - begin;
    return chunk * chunk_bytes() + in_chunk * value_bytes + (group - begin) * kParameterBytes;
  }
};

// Bytes of a panel; a multiple of 64.
inline int64_t panel_bytes(const MatrixShape& shape) {
  if (shape.format == WeightFormat::kInt8) return padded_inputs(shape) * kPanelWidth + kPanelWidth * 4;
  return GroupLayout(shape).panel_bytes();
}

// Byte of value (k, column) within the rows that start at k = 0.
constexpr int64_t byte_of(int64_t k, int column) { return k / 4 * 64 + column * 4 + k % 4; }
// The same for nibbles, and the shift within the byte.
constexpr int64_t nibble_byte(int64_t k, int column) { return k / 8 * 64 + column * 4 + k % 4; }
constexpr int nibble_shift(int64_t k) { return k / 4 % 2 * 4; }

}  // namespace
}  // namespace llmopt::matmul::integer
