// Packing of the integer formats.
#include <stdexcept>
#include <string>

#include "core/linear/pack.h"

namespace llmopt::matmul {

void pack_panel_int(const MatrixShape& shape, const SourceRows&, std::byte*) {
  throw std::invalid_argument(std::string("format ") + name(shape.format) + " cannot be packed by this build.");
}

void unpack_column_int(const MatrixShape& shape, const std::byte*, int, float*) {
  throw std::invalid_argument(std::string("format ") + name(shape.format) + " cannot be unpacked by this build.");
}

}  // namespace llmopt::matmul
