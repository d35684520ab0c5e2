// Grouped formats for many rows: panels are unpacked to bfloat16 in scratch memory, then the tiles of bfloat16
// weights multiply all rows with it. Only for kernel sources.
#pragma once

#include "core/linear/columns.h"
#include "core/linear/kernels.h"

namespace llmopt::matmul {
namespace {

#if defined(__AMX_BF16__)

// Two values of k of all columns, side by side: a row of a bfloat16 panel.
LLMOPT_INLINE void store_pair(Floats even, Floats odd, std::byte* to) {
  // Word 2c comes from `even`, the low half of the joined vector, word 2c + 1 from `odd`.
  alignas(64) static constexpr uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i joined = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
  _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), joined));
}

// A row of quads to two rows of pairs: w = scale * q + offset.
LLMOPT_INLINE void unpack_quads(Bytes q, Floats scale, Floats offset, std::byte* to) {
  const __m512i mask = _mm512_set1_epi32(255);
  const auto value = [&](__m512i bytes) __attribute__((always_inline)) {
    return multiply_add(to_floats(_mm512_and_si512(bytes, mask)), scale, offset);
  };
  store_pair(value(q), value(_mm512_srli_epi32(q, 8)), to);
  store_pair(value(_mm512_srli_epi32(q, 16)), value(_mm512_srli_epi32(q, 24)), to + 64);
}

template <bool kNibbles>
void unpack_panel(const MatrixShape& shape, const std::byte* panel, std::byte* to) {
  const integer::GroupLayout layout(shape);
  const Floats zero = floats_of(kNibbles ? -integer::kZero4 : -integer::kZero8);
  for (int64_t g = 0; g < layout.num_groups; ++g) {
    const std::byte* values = panel + layout.values(g);
    const std::byte* scales = panel + layout.scales(g);
    const Floats scale = load_halves(scales);
    const Floats offset = shape.has_minimum ? load_halves(scales + integer::kParameterBytes) : product(scale, zero);
    for (int64_t i = 0; i < layout.value_bytes; i += 64) {
      const Bytes row = load_row(values + i);
      if constexpr (kNibbles) {
        unpack_quads(low_nibbles(row), scale, offset, to);
        unpack_quads(high_nibbles(row), scale, offset, to + 128);
        to += 256;
      } else {
        unpack_quads(row, scale, offset, to);
        to += 128;
      }
    }
  }
}

// The second memory of the scratch holds the unpacked panels; the kernel of bfloat16 tiles may need the first.
constexpr int64_t kUnpackedBytes = 1 << 20;

inline void multiply_unpacked(const Task& task) {
  const Kernels& dense = kernels(selected_isa());
  const Multiply multiply = dense.bfloat16_tiles ? dense.bfloat16_tiles : dense.bfloat16;
  MatrixShape shape = task.shape;
  shape.format = WeightFormat::kBFloat16;
  shape.group_size = 0;
  shape.has_minimum = false;
  const int64_t bytes = task.depth * kPanelWidth * 2;
  const int64_t group = kUnpackedBytes / bytes < 2 ? 2 : kUnpackedBytes / bytes / 2 * 2;
  std::byte* unpacked = task.scratch.at_least(group * bytes, 1);
  const auto unpack = task.shape.format == WeightFormat::kInt4Group ? unpack_panel<true> : unpack_panel<false>;
  for (int64_t panel = task.panel_begin; panel < task.panel_end; panel += group) {
    const int64_t end = panel + group < task.panel_end ? panel + group : task.panel_end;
    for (int64_t p = panel; p < end; ++p) unpack(task.shape, task.panel(p), unpacked + (p - panel) * bytes);
    multiply({shape, unpacked, bytes, task.depth, task.input, task.output, panel, end, 0, task.scratch, panel});
  }
}

#endif

}  // namespace
}  // namespace llmopt::matmul
