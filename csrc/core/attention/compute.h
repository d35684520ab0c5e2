// The packed formats and products of the tile kernel for each kind of arithmetic.
#pragma once

#include <type_traits>

#include "core/attention/panels.h"
#include "core/attention/storage.h"

namespace llmopt::attention {
namespace {

// Everything in float32; bfloat16 storage is widened when it is packed.
template <class Storage>
struct FloatCompute {
  using Element = typename Storage::Element;
  using Packed = float;
  using Probability = float;
  static constexpr bool kExact = true;
  static constexpr int kRowGroup = 2 * kMicroRows;
  static constexpr int kDepthUnit = 1;  // keys in one packed word of V
  static constexpr int kDepthStep = 1;  // the product with V takes a multiple of this many keys

  static int64_t depth_of(int head_dim) { return head_dim; }

  static void pack_query(const Element* row, int head_dim, float* to) {
    for (int d = 0; d < head_dim; ++d) to[d] = row ? Storage::to_float(row[d]) : 0;
  }

  static void pack_keys(const Element* const* rows, int num_keys, int head_dim, float* panels) {
    pack_transposed(num_keys, head_dim, reinterpret_cast<uint32_t*>(panels), [&](int j, int d) {
      return words(d + kLanes <= head_dim ? Storage::load(rows[j] + d)
                                          : Storage::load_first(rows[j] + d, head_dim - d));
    });
  }

  static void pack_values(const Element* const* rows, int num_keys, int tile_keys, int head_dim_v, float* panels) {
    for (int c = 0; c < head_dim_v; c += kLanes) {
      float* to = panels + static_cast<int64_t>(c / kPanel) * tile_keys * kPanel + c % kPanel;
      const int left = head_dim_v - c;
      for (int j = 0; j < num_keys; ++j) {
        store(to + j * kPanel, left >= kLanes ? Storage::load(rows[j] + c) : Storage::load_first(rows[j] + c, left));
      }
      // Columns past the end are computed and not used.
      if (left <= kLanes && c % kPanel == 0) {
        for (int j = 0; j < num_keys; ++j) store(to + j * kPanel + kLanes, Vec{});
      }
    }
  }

  // scores[:, low ... high) and what shares a panel with them.
  static void multiply_keys(const float* query, int64_t query_stride, int rows, const float* panels, int low, int high,
                            int head_dim, float* scores, int64_t score_stride) {
    for (int j = low / kPanel * kPanel; j < high; j += kPanel) {
      multiply_rows<FloatOp, false>(query, query_stride, rows, panels + static_cast<int64_t>(j) * head_dim, head_dim,
                                    scores + j, score_stride);
    }
  }

  static void multiply_values(const float* probs, int64_t prob_stride, int rows, const float* panels, int tile_keys,
                              int low, int high, int head_dim_v, float* acc, int64_t acc_stride) {
    for (int c = 0; c < head_dim_v; c += kPanel) {
      multiply_rows<FloatOp, true>(probs + low, prob_stride, rows,
                                   panels + static_cast<int64_t>(c / kPanel) * tile_keys * kPanel + low * kPanel,
                                   high - low, acc + c, acc_stride);
    }
  }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16 in words; probabilities are rounded to bfloat16 for the product with V.
struct PairCompute {
  using Element = uint16_t;
  using Packed = uint32_t;
  using Probability = uint16_t;
  static constexpr bool kExact = false;
  static constexpr int kRowGroup = 2 * kMicroRows;
  static constexpr int kDepthUnit = 2;
  static constexpr int kDepthStep = kPanel;  // packed V is complete up to the next panel

  static int64_t depth_of(int head_dim) { return (head_dim + 1) / 2; }

  static void pack_query(const uint16_t* row, int head_dim, uint32_t* to) {
    pack_query_words(row, head_dim, depth_of(head_dim), to);
  }
  static void pack_keys(const uint16_t* const* rows, int num_keys, int head_dim, uint32_t* panels) {
    pack_key_words(rows, num_keys, head_dim, depth_of(head_dim), panels);
  }

  static void pack_values(const uint16_t* const* rows, int num_keys, int tile_keys, int head_dim_v, uint32_t* panels) {
    const int padded = static_cast<int>(round_up(num_keys, kDepthStep));
    for (int c = 0; c < round_up(head_dim_v, kPanel); c += kLanes) {
      uint32_t* to = panels + static_cast<int64_t>(c / kPanel) * (tile_keys / 2) * kPanel + c % kPanel;
      const int left = head_dim_v - c;
      auto load = [&](int j) {
        if (j >= num_keys || left <= 0) return WordVec{};
        return widen(left >= kLanes ? load_as<HalfVec>(rows[j] + c) : load_first<HalfVec>(rows[j] + c, left));
      };
      for (int j = 0; j < padded; j += 2) store(to + j / 2 * kPanel, load(j) | load(j + 1) << 16);
    }
  }

  static void multiply_keys(const uint32_t* query, int64_t query_stride, int rows, const uint32_t* panels, int low,
                            int high, int head_dim, float* scores, int64_t score_stride) {
    const int64_t depth = depth_of(head_dim);
    for (int j = low / kPanel * kPanel; j < high; j += kPanel) {
      multiply_rows<PairOp, false>(query, query_stride, rows, panels + j * depth, depth, scores + j, score_stride);
    }
  }

  static void multiply_values(const uint16_t* probs, int64_t prob_stride, int rows, const uint32_t* panels,
                              int tile_keys, int low, int high, int head_dim_v, float* acc, int64_t acc_stride) {
    const auto* pairs = reinterpret_cast<const uint32_t*>(probs + low);
    for (int c = 0; c < head_dim_v; c += kPanel) {
      const uint32_t* panel = panels + static_cast<int64_t>(c / kPanel) * (tile_keys / 2) * kPanel + low / 2 * kPanel;
      multiply_rows<PairOp, true>(pairs, prob_stride / 2, rows, panel, (high - low) / 2, acc + c, acc_stride);
    }
  }

  static void pack_query_words(const uint16_t* row, int head_dim, int64_t depth, uint32_t* to) {
    std::memset(to, 0, depth * sizeof(uint32_t));
    if (row) std::memcpy(to, row, head_dim * sizeof(uint16_t));
  }

  static void pack_key_words(const uint16_t* const* rows, int num_keys, int head_dim, int64_t depth, uint32_t* panels) {
    pack_transposed(num_keys, depth, panels, [&](int j, int d) {
      const int left = head_dim - 2 * d;
      return left >= 2 * kLanes ? load_as<WordVec>(rows[j] + 2 * d)
                                : load_first<WordVec>(rows[j] + 2 * d, max(0, left));
    });
  }
};
#endif

#if defined(__AMX_BF16__)
// The same formats with depth and rows padded for tiles of 16 rows x 16 words.
struct AmxCompute {
  using Element = uint16_t;
  using Packed = uint32_t;
  using Probability = uint16_t;
  static constexpr bool kExact = false;
  static constexpr int kRowGroup = 32;
  static constexpr int kDepthUnit = 2;
  static constexpr int kDepthStep = 32;
  static_assert(kPanel == 32);

  static int64_t depth_of(int head_dim) { return round_up(head_dim, 32) / 2; }

  static void pack_query(const uint16_t* row, int head_dim, uint32_t* to) {
    PairCompute::pack_query_words(row, head_dim, depth_of(head_dim), to);
  }
  static void pack_keys(const uint16_t* const* rows, int num_keys, int head_dim, uint32_t* panels) {
    PairCompute::pack_key_words(rows, num_keys, head_dim, depth_of(head_dim), panels);
  }
  static void pack_values(const uint16_t* const* rows, int num_keys, int tile_keys, int head_dim_v, uint32_t* panels) {
    PairCompute::pack_values(rows, num_keys, tile_keys, head_dim_v, panels);
  }

  static void multiply_keys(const uint32_t* query, int64_t query_stride, int rows, const uint32_t* panels, int low,
                            int high, int head_dim, float* scores, int64_t score_stride) {
    const int64_t depth = depth_of(head_dim);
    for (int j = low / kPanel * kPanel; j < high; j += kPanel) {
      multiply<false>(query, query_stride, rows, panels + j * depth, depth, scores + j, score_stride);
    }
  }

  static void multiply_values(const uint16_t* probs, int64_t prob_stride, int rows, const uint32_t* panels,
                              int tile_keys, int low, int high, int head_dim_v, float* acc, int64_t acc_stride) {
    const auto* pairs = reinterpret_cast<const uint32_t*>(probs + low);
    for (int c = 0; c < head_dim_v; c += kPanel) {
      const uint32_t* panel = panels + static_cast<int64_t>(c / kPanel) * (tile_keys / 2) * kPanel + low / 2 * kPanel;
      multiply<true>(pairs, prob_stride / 2, rows, panel, (high - low) / 2, acc + c, acc_stride);
    }
  }

  // 32 (or 16) rows x 32 columns. Tiles 0-3: sums, 4-5: rows, 6-7: panel.
  template <bool kAdd>
  static LLMOPT_INLINE void multiply(const uint32_t* left, int64_t left_stride, int rows, const uint32_t* panel,
                                     int64_t depth, float* out, int64_t out_stride) {
    const int64_t left_bytes = left_stride * 4, out_bytes = out_stride * 4;
    const bool both = rows > 16;
    // The tile intrinsics do not tell the compiler which memory they touch.
    asm volatile("" : : : "memory");
    const uint32_t* left2 = left + 16 * left_stride;
    float* out2 = out + 16 * out_stride;
    if constexpr (kAdd) {
      _tile_loadd(0, out, out_bytes);
      _tile_loadd(1, out + 16, out_bytes);
      if (both) {
        _tile_loadd(2, out2, out_bytes);
        _tile_loadd(3, out2 + 16, out_bytes);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t d = 0; d < depth; d += 16) {
      _tile_loadd(4, left + d, left_bytes);
      _tile_loadd(6, panel + d * kPanel, kPanel * 4);
      _tile_loadd(7, panel + d * kPanel + 16, kPanel * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (both) {
        _tile_loadd(5, left2 + d, left_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + 16, out_bytes);
    if (both) {
      _tile_stored(2, out2, out_bytes);
      _tile_stored(3, out2 + 16, out_bytes);
    }
    asm volatile("" : : : "memory");
  }
};
#endif

}  // namespace
}  // namespace llmopt::attention
