// Memory of a step: input rows in the form of the kernels, and scratch.
#include <cstdlib>
#include <cstring>
#include <new>

#include "core/linear/kernels.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace llmopt {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kRowPadding = 128;  // values
constexpr int64_t kTileRows = 16;     // kernels read whole tiles of rows
constexpr int64_t kInputGroup = 32;   // values of kInt8Group that share a scale
constexpr size_t kHugePage = 2 << 20;

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

int64_t value_bytes(InputForm form) { return form == InputForm::kFloat32 ? 4 : form == InputForm::kBFloat16 ? 2 : 1; }

// Large blocks lie on huge pages where the system gives them: rows are read in an order that misses a small TLB.
void* allocate(size_t bytes) {
  const bool is_large = bytes >= kHugePage;
  const size_t alignment = is_large ? kHugePage : kLine;
  void* memory = std::aligned_alloc(alignment, round_up(bytes, alignment));
  if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (is_large) madvise(memory, round_up(bytes, alignment), MADV_HUGEPAGE);  // a hint: failure changes nothing
#endif
  return memory;
}

}  // namespace

void AlignedFree::operator()(std::byte* memory) const { std::free(memory); }

std::byte* LinearScratch::at_least(size_t bytes, int which) {
  if (bytes > size_[which]) {
    memory_[which].reset();  // first: never both at once
    size_[which] = 0;
    memory_[which].reset(static_cast<std::byte*>(allocate(bytes)));
    size_[which] = bytes;
  }
  return memory_[which].get();
}

void InputBuffer::resize(InputForm form, int64_t num_rows, int64_t num_inputs) {
  const int64_t padded = round_up(num_inputs, kRowPadding);
  // An odd number of cache lines per row: the rows of a tile then fall into different sets of the cache.
  // So do the planes of kInt16Token.
  const int64_t planes = form == InputForm::kInt16Token ? 2 : 1;
  const int64_t row_bytes = (padded * value_bytes(form) / kLine | 1) * kLine * planes;
  const int64_t rows_bytes = round_up(num_rows, kTileRows) * row_bytes;
  const int64_t scale_stride = form == InputForm::kInt8Group ? padded / kInputGroup : 0;
  const int64_t num_scales = form == InputForm::kInt16Token ? num_rows * planes : num_rows * scale_stride;
  const int64_t scale_bytes = round_up(num_scales * static_cast<int64_t>(sizeof(float)), kLine);
  // Scales, sums, negative sums, and two negative half sums for each.
  const size_t needed = rows_bytes + 5 * scale_bytes;
  if (needed > capacity_) {
    memory_.reset();
    capacity_ = 0;
    memory_.reset(static_cast<std::byte*>(allocate(needed)));
    capacity_ = needed;
  }
  rows_ = {};
  rows_.form = form;
  rows_.num_rows = num_rows;
  rows_.num_inputs = num_inputs;
  rows_.data = memory_.get();
  rows_.row_bytes = row_bytes;
  rows_.scale_stride = scale_stride;
  if (num_scales == 0) return;
  const auto part = [&](int64_t index) { return memory_.get() + rows_bytes + index * scale_bytes; };
  rows_.scales = reinterpret_cast<const float*>(part(0));
  rows_.negative_sums = reinterpret_cast<const int32_t*>(part(1));
  if (form == InputForm::kInt8Group) {
    rows_.sums = reinterpret_cast<const float*>(part(2));
    rows_.negative_half_sums = reinterpret_cast<const int32_t*>(part(3));
  }
}

void InputBuffer::fill_row(int64_t index, const float* values) {
  static const matmul::Kernels& kernels = matmul::kernels(selected_isa());
  std::byte* row = memory_.get() + index * rows_.row_bytes;
  const int64_t n = rows_.num_inputs, padded = round_up(n, kRowPadding);
  switch (rows_.form) {
    case InputForm::kFloat32:
      std::memcpy(row, values, n * sizeof(float));
      std::memset(row + n * sizeof(float), 0, (padded - n) * sizeof(float));
      return;
    case InputForm::kBFloat16:
      return kernels.fill_bfloat16(values, n, padded, reinterpret_cast<uint16_t*>(row));
    case InputForm::kInt16Token:
      return kernels.fill_int16_token(
          values, n, padded, reinterpret_cast<int8_t*>(row), reinterpret_cast<int8_t*>(row + rows_.row_bytes / 2),
          const_cast<float*>(rows_.scales) + index, const_cast<int32_t*>(rows_.negative_sums) + 2 * index);
    case InputForm::kInt8Group: {
      const int64_t at = index * rows_.scale_stride;
      return kernels.fill_int8_group(values, n, padded, reinterpret_cast<int8_t*>(row),
                                     const_cast<float*>(rows_.scales) + at, const_cast<float*>(rows_.sums) + at,
                                     const_cast<int32_t*>(rows_.negative_sums) + at,
                                     const_cast<int32_t*>(rows_.negative_half_sums) + 2 * at);
    }
  }
}

}  // namespace llmopt
