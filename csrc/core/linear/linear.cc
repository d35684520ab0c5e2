#include "llmopt/linear.h"

#include <algorithm>
#include <cassert>
#include <stdexcept>
#include <string>

#include "core/linear/kernels.h"

namespace llmopt {
namespace matmul {

const Kernels& kernels(Isa isa) {
  switch (isa) {
#if defined(LLMOPT_X86)
    case Isa::kAmx:
      return amx_kernels();
    case Isa::kAvx512Bf16:
      return avx512_bf16_kernels();
    case Isa::kAvx512:
      return avx512_kernels();
    case Isa::kAvx2:
      return avx2_kernels();
#endif
    default:
      return portable_kernels();
  }
}

namespace {

const Kernels& selected() {
  static const Kernels& chosen = kernels(selected_isa());
  return chosen;
}

bool unpacks_groups(int64_t num_rows) {
  return selected().group_unpacked != nullptr && num_rows >= linear_tuning().unpack_rows;
}

// The kernel for so many rows of this form; null when this build has none.
Multiply choose(WeightFormat format, InputForm form, int64_t num_rows) {
  const Kernels& kernels = selected();
  const LinearTuning& tuning = linear_tuning();
  const auto from = [&](Multiply tiles, int tile_rows, Multiply few_rows) {
    return tiles && num_rows >= tile_rows ? tiles : few_rows;
  };
  switch (format) {
    case WeightFormat::kFloat32:
      return kernels.float32;
    case WeightFormat::kBFloat16:
      return from(kernels.bfloat16_tiles, tuning.tile_rows_bf16, kernels.bfloat16);
    case WeightFormat::kInt8:
      return from(kernels.int8_tiles, tuning.tile_rows_int8, kernels.int8);
    case WeightFormat::kInt8Group:
      return form != InputForm::kInt8Group ? kernels.group_unpacked
                                           : from(kernels.group_tiles, tuning.tile_rows_group, kernels.int8_group);
    case WeightFormat::kInt4Group:
      return form != InputForm::kInt8Group ? kernels.group_unpacked
                                           : from(kernels.group_tiles, tuning.tile_rows_group, kernels.int4_group);
  }
  return nullptr;
}

}  // namespace
}  // namespace matmul

LinearTuning& linear_tuning() {
  static LinearTuning tuning;
  return tuning;
}

InputForm input_form(const MatrixShape& shape, int64_t num_rows) {
  switch (shape.format) {
    case WeightFormat::kFloat32:
      return InputForm::kFloat32;
    case WeightFormat::kBFloat16:
      return matmul::selected().bf16_form;
    case WeightFormat::kInt8:
      return InputForm::kInt16Token;
    default:
      return matmul::unpacks_groups(num_rows) ? matmul::selected().bf16_form : InputForm::kInt8Group;
  }
}

void linear(const PackedMatrix& matrix, const InputRows& input, const LinearOutput& output, int64_t panel_begin,
            int64_t panel_end, LinearScratch& scratch) {
  const MatrixShape& shape = matrix.shape;
  assert(input.num_inputs == shape.num_inputs);
  assert(0 <= panel_begin && panel_end <= shape.num_panels());
  if (panel_begin >= panel_end || input.num_rows == 0) return;
  const int64_t bytes = panel_bytes(shape);
  const int64_t ahead = std::min<int64_t>(linear_tuning().prefetch_bytes, bytes) / 64 * 64;
  const matmul::Task task{shape,     matrix.data, bytes,  padded_inputs(shape), input, output, panel_begin,
                          panel_end, ahead,       scratch};
  const matmul::Multiply multiply = matmul::choose(shape.format, input.form, input.num_rows);
  assert(multiply != nullptr);
  multiply(task);
}

void prefetch_panels(const PackedMatrix& matrix, int64_t panel_begin, int64_t panel_end) {
  // As much as the kernels expect to find when they start: their own prefetches take over behind it.
  const int64_t wanted = std::max(linear_tuning().prefetch_bytes, 4096);
  const int64_t bytes = std::min((panel_end - panel_begin) * panel_bytes(matrix.shape), wanted);
  const std::byte* from = matrix.panel(panel_begin);
  for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(from + offset, 0, 3);
}

TileScope::TileScope() : entered_(matmul::selected().enter_tiles != nullptr) {
  if (entered_) matmul::selected().enter_tiles();
}

TileScope::~TileScope() {
  if (entered_) matmul::selected().leave_tiles();
}

}  // namespace llmopt
