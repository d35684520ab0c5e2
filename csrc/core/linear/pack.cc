#include "core/linear/pack.h"

#include <memory>
#include <stdexcept>
#include <string>

#include "core/linear/half.h"

namespace llmopt {
namespace matmul {

void read_row(const SourceRows& source, int row, int64_t num_inputs, float* out) {
  const int64_t stride = source.element_stride;
  if (source.rows[row] == nullptr) {
    std::memset(out, 0, num_inputs * sizeof(float));
  } else if (source.type == SourceType::kFloat32) {
    const auto* from = static_cast<const float*>(source.rows[row]);
    for (int64_t k = 0; k < num_inputs; ++k) out[k] = from[k * stride];
  } else {
    const auto* from = static_cast<const uint16_t*>(source.rows[row]);
    if (source.type == SourceType::kBFloat16) {
      for (int64_t k = 0; k < num_inputs; ++k) out[k] = bfloat16_to_float(from[k * stride]);
    } else {
      for (int64_t k = 0; k < num_inputs; ++k) out[k] = from_float16(from[k * stride]);
    }
  }
}

namespace {

void pack_float32(const MatrixShape& shape, const SourceRows& source, float* panel) {
  const auto row = std::make_unique_for_overwrite<float[]>(shape.num_inputs);
  for (int column = 0; column < kPanelWidth; ++column) {
    read_row(source, column, shape.num_inputs, row.get());
    for (int64_t k = 0; k < shape.num_inputs; ++k) panel[k * kPanelWidth + column] = row[k];
  }
}

// Pairs of k side by side: [padded K / 2][16 columns][2].
void pack_bfloat16(const MatrixShape& shape, const SourceRows& source, uint16_t* panel) {
  const int64_t padded = padded_inputs(shape);
  const auto row = std::make_unique_for_overwrite<float[]>(padded);
  const auto place = [&](int column, int64_t k) -> uint16_t& {
    return panel[(k / 2 * kPanelWidth + column) * 2 + k % 2];
  };
  for (int column = 0; column < kPanelWidth; ++column) {
    if (source.type == SourceType::kBFloat16 && source.rows[column] != nullptr) {  // nothing to round
      const auto* from = static_cast<const uint16_t*>(source.rows[column]);
      for (int64_t k = 0; k < shape.num_inputs; ++k) place(column, k) = from[k * source.element_stride];
    } else {
      read_row(source, column, shape.num_inputs, row.get());
      for (int64_t k = 0; k < shape.num_inputs; ++k) place(column, k) = float_to_bfloat16(row[k]);
    }
    for (int64_t k = shape.num_inputs; k < padded; ++k) place(column, k) = 0;
  }
}

}  // namespace
}  // namespace matmul

void pack_panel(const MatrixShape& shape, const SourceRows& source, std::byte* panel) {
  if (shape.num_outputs <= 0 || shape.num_inputs <= 0) {
    throw std::invalid_argument("a matrix of " + std::to_string(shape.num_outputs) + " x " +
                                std::to_string(shape.num_inputs) + " cannot be packed; both sizes must be positive.");
  }
  switch (shape.format) {
    case WeightFormat::kFloat32:
      return matmul::pack_float32(shape, source, reinterpret_cast<float*>(panel));
    case WeightFormat::kBFloat16:
      return matmul::pack_bfloat16(shape, source, reinterpret_cast<uint16_t*>(panel));
    default:
      return matmul::pack_panel_int(shape, source, panel);
  }
}

void unpack_row(const PackedMatrix& matrix, int64_t row, float* out) {
  const MatrixShape& shape = matrix.shape;
  const std::byte* panel = matrix.panel(row / kPanelWidth);
  const auto column = static_cast<int>(row % kPanelWidth);
  switch (shape.format) {
    case WeightFormat::kFloat32: {
      const auto* from = reinterpret_cast<const float*>(panel) + column;
      for (int64_t k = 0; k < shape.num_inputs; ++k) out[k] = from[k * kPanelWidth];
      return;
    }
    case WeightFormat::kBFloat16: {
      const auto* from = reinterpret_cast<const uint16_t*>(panel) + column * 2;
      for (int64_t k = 0; k < shape.num_inputs; ++k) {
        out[k] = matmul::bfloat16_to_float(from[k / 2 * kPanelWidth * 2 + k % 2]);
      }
      return;
    }
    default:
      matmul::unpack_column_int(shape, panel, column, out);
  }
}

}  // namespace llmopt
