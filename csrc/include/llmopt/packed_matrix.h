// A weight matrix in the layout that the kernels read: packed once, then only streamed.
//
// W is [num_outputs, num_inputs] (N, K): y = x W^T. The outputs are cut into panels of kPanelWidth columns of y. A
// panel is one contiguous, 64-byte aligned range of bytes, read from front to back by one thread; whatever the kernel
// needs beside the values (scales, minimums, sums) lies in the panel too. The same layout serves every instruction set,
// so a packed file can be moved between machines. docs/kernels.md draws the layouts.
#pragma once

#include <cstdint>
#include <span>

namespace llmopt {

inline constexpr int kPanelWidth = 16;

enum class WeightFormat : uint8_t {
  kFloat32,    // [K][16] float32
  kBFloat16,   // [K/32] tiles of [16 pairs of k][16 columns][2] bfloat16: an AMX tile, and a row of AVX512_BF16
  kInt8,       // [K/64] tiles of [16 quads of k][16 columns][4] uint8, w = scale * (q - 128); then 16 float32 scales
  kInt8Group,  // per group of k: the quads of the group as above, 16 float16 scales
  kInt4Group,  // per group of k: 4-bit values (0..15), 16 float16 scales, and 16 float16 minimums if has_minimum
};

const char* name(WeightFormat format);

// What a matrix is, without its bytes.
struct MatrixShape {
  WeightFormat format = WeightFormat::kFloat32;
  int64_t num_outputs = 0;   // N; the last panel is padded with zero columns
  int64_t num_inputs = 0;    // K; padded with zeros to a multiple of input_padding
  int group_size = 0;        // grouped formats: values of k that share a scale: 16 (kInt8Group only), 32, 64 or 128
  bool has_minimum = false;  // kInt4Group: w = scale * q + minimum; otherwise w = scale * (q - 8)

  bool operator==(const MatrixShape&) const = default;
  int64_t num_panels() const { return (num_outputs + kPanelWidth - 1) / kPanelWidth; }
};

int64_t input_padding(const MatrixShape& shape);  // K is padded to a multiple of this
int64_t padded_inputs(const MatrixShape& shape);
int64_t panel_bytes(const MatrixShape& shape);  // a multiple of 64
int64_t packed_bytes(const MatrixShape& shape);

// The memory belongs to whoever made it and outlives the object.
struct PackedMatrix {
  MatrixShape shape;
  const std::byte* data = nullptr;  // [num_panels][panel_bytes], 64-byte aligned

  const std::byte* panel(int64_t index) const { return data + index * panel_bytes(shape); }
};

// Element types of dense weights that can be packed.
enum class SourceType : uint8_t { kFloat32, kBFloat16, kFloat16 };

// One panel's worth of rows of W. A null row becomes zeros. Element k of a row is `element_stride` elements after the
// one before it (1 for torch's Linear, num_outputs for GPT-2's transposed Conv1D).
struct SourceRows {
  SourceType type = SourceType::kFloat32;
  const void* rows[kPanelWidth] = {};
  int64_t element_stride = 1;
  // [num_inputs] weight of each input's squared error in the integer formats' fits, or null: all the same
  const float* importance = nullptr;
};

// Pack one panel. Integer formats round to the nearest step; their scales (and minimums) are those of least squared
// error among the candidates that pack_int.cc lists.
// Throws std::invalid_argument for a shape that no kernel reads.
void pack_panel(const MatrixShape& shape, const SourceRows& source, std::byte* panel);

// One row of W back as float32: the row of an embedding that is stored as a matrix. out: [num_inputs]
void unpack_row(const PackedMatrix& matrix, int64_t row, float* out);

}  // namespace llmopt
