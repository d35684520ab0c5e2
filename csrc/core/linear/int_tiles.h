// Grouped formats with a moderate number of rows: the dot products of 16 rows with a group in one AMX tile, then the
// scales of both in float32. Only for kernel sources.
//
// A panel is unpacked to signed bytes in scratch memory first. Per 32 values of k (16 for groups of 16), with tiles of
// just that depth: [rows x 32] times [32 x 16 columns] -> int32 sums through memory -> 16 vectors of float32.
#pragma once

#if defined(__AMX_INT8__)

#include "core/linear/int_groups.h"
#include "core/tiles.h"

namespace llmopt::matmul {
namespace {

// Tiles 0 and 1: sums. 2 and 3: input. 4 and 5: weights.
struct alignas(64) GroupTileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr GroupTileConfig(int num_rows, int depth) {
    for (int t = 0; t < 6; ++t) {
      row_bytes[t] = static_cast<uint16_t>(t == 2 || t == 3 ? depth : 64);
      rows[t] = static_cast<uint8_t>(t < 4 ? num_rows : depth / 4);
    }
  }
};
static_assert(sizeof(GroupTileConfig) == 64);

// Within a TileScope: other tiles than those of everybody.
class GroupTiles {
 public:
  explicit GroupTiles(const GroupTileConfig& config) {
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~GroupTiles() { enter_tiles(); }
  GroupTiles(const GroupTiles&) = delete;
  GroupTiles& operator=(const GroupTiles&) = delete;
};

// To signed bytes, rows of quads in order of k. Values with minimums stay 0..15.
template <class Values, bool kMinimum>
void unpack_signed(const integer::GroupLayout& layout, const std::byte* panel, int64_t ahead, std::byte* to) {
  constexpr bool kNibbles = Values::kRowInputs == 8;
  const __m512i zero = _mm512_set1_epi8(kMinimum ? 0 : kNibbles ? integer::kZero4 : -128);
  for (int64_t g = 0; g < layout.num_groups; ++g) {
    const std::byte* values = panel + layout.values(g);
    for (int64_t i = 0; i < layout.value_bytes; i += 64) {
      __builtin_prefetch(values + i + ahead, 0, 3);
      const Bytes row = load_row(values + i);
      if constexpr (kNibbles) {
        _mm512_store_si512(to, _mm512_sub_epi8(low_nibbles(row), zero));
        _mm512_store_si512(to + 64, _mm512_sub_epi8(high_nibbles(row), zero));
        to += 128;
      } else {
        _mm512_store_si512(to, _mm512_xor_si512(row, zero));
        to += 64;
      }
    }
    __builtin_prefetch(panel + layout.scales(g) + ahead, 0, 3);
  }
}

// dots = 16 rows of x times kInputs rows of weights.
template <int kTile, int kInputs>
LLMOPT_INLINE void dot_tile(const int8_t* x, int64_t row_bytes, const std::byte* weights, int32_t* dots) {
  if constexpr (kTile == 0) {
    _tile_zero(0);
    _tile_loadd(2, x, row_bytes);
    _tile_loadd(4, weights, 64);
    _tile_dpbssd(0, 2, 4);
    _tile_stored(0, dots, 64);
  } else {
    _tile_zero(1);
    _tile_loadd(3, x, row_bytes);
    _tile_loadd(5, weights, 64);
    _tile_dpbssd(1, 3, 5);
    _tile_stored(1, dots, 64);
  }
}

// Scales (and sums) of 16 rows side by side: [groups of x][16].
struct TileScales {
  const float* scales;
  const float* sums;
};

template <class Values, int kGroup, bool kMinimum, int kRows>
void multiply_tile_groups(const Task& task, const integer::GroupLayout& layout, const std::byte* panel,
                          const std::byte* weights, int64_t row, const TileScales& of_x, float* out, int64_t stride) {
  constexpr int kInputs = kGroup < integer::kInputGroup ? kGroup : integer::kInputGroup;
  constexpr int kParts = kGroup / kInputs;
  constexpr int kTileFloats = 16 * kPanelWidth;
  const int64_t row_bytes = task.input.row_bytes;
  const int8_t* x = int8_row(task, row);
  // Stores of tiles are not forwarded to loads: what is stored now is read one or two groups later.
  constexpr int kDelay = kParts == 1 ? 2 : 1;
  alignas(64) int32_t dots[(kDelay + 1) * kParts][kTileFloats];
  Floats y[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) y[r] = zero_floats();
  const auto store_dots = [&](int64_t g, int32_t (*to)[kTileFloats]) __attribute__((always_inline)) {
    const int8_t* group_x = x + g * kGroup;
    const std::byte* group_weights = weights + g * kGroup * kPanelWidth;
    asm volatile("" : : : "memory");  // the tile intrinsics do not tell the compiler which memory they touch
#pragma GCC unroll 4
    for (int i = 0; i < kParts; i += 2) {
      dot_tile<0, kInputs>(group_x + i * kInputs, row_bytes, group_weights + i * kInputs * kPanelWidth, to[i]);
      if constexpr (kParts > 1) {
        dot_tile<1, kInputs>(group_x + (i + 1) * kInputs, row_bytes, group_weights + (i + 1) * kInputs * kPanelWidth,
                             to[i + 1]);
      }
    }
    asm volatile("" : : : "memory");
  };
  const auto add_dots = [&](int64_t g, const int32_t (*group_dots)[kTileFloats]) __attribute__((always_inline)) {
    const std::byte* parameters = panel + layout.scales(g);
    const Floats scale = load_halves(parameters);
    Floats minimum = zero_floats();
    if constexpr (kMinimum) minimum = load_halves(parameters + integer::kParameterBytes);
    const int64_t first = g * kGroup / integer::kInputGroup * 16;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto dot = [&](int i) __attribute__((always_inline)) {
        return to_floats(load_as<Sums>(group_dots[i] + r * kPanelWidth));
      };
      Floats part = product(dot(0), floats_of(of_x.scales[first + r]));
#pragma GCC unroll 4
      for (int i = 1; i < kParts; ++i) part = multiply_add(dot(i), floats_of(of_x.scales[first + i * 16 + r]), part);
      y[r] = multiply_add(part, scale, y[r]);
      if constexpr (kMinimum) {
#pragma GCC unroll 4
        for (int i = 0; i < kParts; ++i) y[r] = multiply_add(minimum, floats_of(of_x.sums[first + i * 16 + r]), y[r]);
      }
    }
  };
  const int64_t num_groups = layout.num_groups;
  for (int64_t g = 0; g < num_groups + kDelay; ++g) {
    if (g < num_groups) store_dots(g, dots + g % (kDelay + 1) * kParts);
    if (g >= kDelay) add_dots(g - kDelay, dots + (g - kDelay) % (kDelay + 1) * kParts);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) store_floats(out + r * stride, y[r]);
}

template <class Values, int kGroup, bool kMinimum>
void multiply_group_tiles_of(const Task& task) {
  constexpr int kInputs = kGroup < integer::kInputGroup ? kGroup : integer::kInputGroup;
  constexpr int kStride = 2 * kPanelWidth, kTileRows = 16;
  const integer::GroupLayout layout(task.shape);
  const int64_t num_rows = task.input.num_rows, x_groups = task.depth / integer::kInputGroup;
  const int64_t row_tiles = (num_rows + kTileRows - 1) / kTileRows;

  // Scratch: sums of all rows, their scales and sums of x side by side, one unpacked panel.
  const int64_t sum_count = row_tiles * kTileRows * kStride, scale_count = row_tiles * x_groups * kTileRows;
  auto* sums = reinterpret_cast<float*>(
      task.scratch.at_least((sum_count + 2 * scale_count) * sizeof(float) + task.depth * kPanelWidth));
  float* scales = sums + sum_count;
  float* x_sums = scales + scale_count;
  auto* weights = reinterpret_cast<std::byte*>(x_sums + scale_count);
  for (int64_t t = 0; t < row_tiles; ++t) {
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t row = t * kTileRows + r;
      const bool is_real = row < num_rows;
      const float* from = task.input.scales + row * task.input.scale_stride;
      const float* sums_from = task.input.sums + row * task.input.scale_stride;
      for (int64_t g = 0; g < x_groups; ++g) {
        const int64_t to = (t * x_groups + g) * kTileRows + r;
        scales[to] = is_real ? from[g] : 0.0f;
        if (kMinimum) x_sums[to] = is_real ? sums_from[g] : 0.0f;
      }
    }
  }

  static const GroupTileConfig eight(8, kInputs), sixteen(16, kInputs);
  const GroupTiles tiles(num_rows <= 8 ? eight : sixteen);
  for (int64_t panel = task.panel_begin; panel < task.panel_end; panel += 2) {
    const int group = panel + 1 < task.panel_end ? 2 : 1;
    for (int p = 0; p < group; ++p) {
      const std::byte* packed = task.panel(panel + p);
      unpack_signed<Values, kMinimum>(layout, packed, task.panel_bytes, weights);
      for (int64_t t = 0; t < row_tiles; ++t) {
        const int64_t row = t * kTileRows, offset = t * x_groups * kTileRows;
        const TileScales of_x{scales + offset, x_sums + offset};
        float* out = sums + row * kStride + p * kPanelWidth;
        if (num_rows - row <= 8) {
          multiply_tile_groups<Values, kGroup, kMinimum, 8>(task, layout, packed, weights, row, of_x, out, kStride);
        } else {
          multiply_tile_groups<Values, kGroup, kMinimum, 16>(task, layout, packed, weights, row, of_x, out, kStride);
        }
      }
    }
    finish(task, 0, static_cast<int>(num_rows), panel, group, sums, kStride);
  }
}

inline void multiply_group_tiles(const Task& task) {
  const bool is_int4 = task.shape.format == WeightFormat::kInt4Group, minimum = task.shape.has_minimum;
  switch (task.shape.group_size) {
    case 16:
      return multiply_group_tiles_of<ByteValues, 16, false>(task);
    case 32:
      return !is_int4  ? multiply_group_tiles_of<ByteValues, 32, false>(task)
             : minimum ? multiply_group_tiles_of<NibbleValues, 32, true>(task)
                       : multiply_group_tiles_of<NibbleValues, 32, false>(task);
    case 64:
      return !is_int4  ? multiply_group_tiles_of<ByteValues, 64, false>(task)
             : minimum ? multiply_group_tiles_of<NibbleValues, 64, true>(task)
                       : multiply_group_tiles_of<NibbleValues, 64, false>(task);
    default:
      return !is_int4  ? multiply_group_tiles_of<ByteValues, 128, false>(task)
             : minimum ? multiply_group_tiles_of<NibbleValues, 128, true>(task)
                       : multiply_group_tiles_of<NibbleValues, 128, false>(task);
  }
}

}  // namespace
}  // namespace llmopt::matmul
#endif
