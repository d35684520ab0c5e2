#include "llmopt/packed_matrix.h"

#include <stdexcept>
#include <string>

#include "core/linear/int_layout.h"

namespace llmopt {
namespace {

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Bytes of a panel before it is rounded up to whole cache lines.
int64_t used_bytes(const MatrixShape& shape) {
  const int64_t values = padded_inputs(shape) * kPanelWidth;
  switch (shape.format) {
    case WeightFormat::kFloat32:
      return values * 4;
    case WeightFormat::kBFloat16:
      return values * 2;
    default:
      return matmul::integer::panel_bytes(shape);
  }
}

}  // namespace

const char* name(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat32:
      return "float32";
    case WeightFormat::kBFloat16:
      return "bfloat16";
    case WeightFormat::kInt8:
      return "int8";
    case WeightFormat::kInt8Group:
      return "int8_group";
    case WeightFormat::kInt4Group:
      return "int4_group";
  }
  return "unknown";
}

int64_t input_padding(const MatrixShape& shape) {
  const bool grouped = shape.format == WeightFormat::kInt8Group || shape.format == WeightFormat::kInt4Group;
  const int group = shape.group_size;
  const bool known =
      group == 32 || group == 64 || group == 128 || (group == 16 && shape.format == WeightFormat::kInt8Group);
  if (grouped ? !known : group != 0) {
    throw std::invalid_argument(std::string("a matrix of format ") + name(shape.format) + " has group_size " +
                                std::to_string(group) + "; grouped formats take 32, 64 or 128 (int8_group also 16), " +
                                "the others 0.");
  }
  switch (shape.format) {
    case WeightFormat::kFloat32:
      return 1;
    case WeightFormat::kBFloat16:
      return 32;
    case WeightFormat::kInt8:
      return 64;
    default:
      return group < 32 ? 32 : group;
  }
}

int64_t padded_inputs(const MatrixShape& shape) { return round_up(shape.num_inputs, input_padding(shape)); }

int64_t panel_bytes(const MatrixShape& shape) { return round_up(used_bytes(shape), 64); }

int64_t packed_bytes(const MatrixShape& shape) { return shape.num_panels() * panel_bytes(shape); }

}  // namespace llmopt
