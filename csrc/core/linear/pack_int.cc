// Weights to integers. The 16 columns of a panel are the lanes of one vector, so every column is fitted by itself
// without a sum across lanes. Compiled for the default instruction set: the same weights give the same bytes on every
// machine.
//
// All fits minimise sum_k importance_k (w_k - dequantized w_k)^2 over candidates:
//   kInt8       max |w| / 127, and clipped to 0.95 ... 0.6 of it; then the scale of least squares for the rounded
//   values kInt8Group  max |w| / 127.5 ... 125; then the scale of least squares kInt4Group  the value of largest
//   magnitude falls on -7 ... -9.4 (beyond -8: clipped), of either sign; then least squares
//               with minimum: (max - min) / 13.5 ... 16.2; then scale and minimum of least squares
// For groups, parameters are then rounded to float16 and compared with the plain ones, so rounded. Last, values are
// rounded for the parameters as stored.

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/linear/half.h"
#include "core/linear/int_layout.h"
#include "core/linear/pack.h"
#include "llmopt/quantized_panel.h"

namespace llmopt::matmul {

using namespace integer;

namespace {

typedef float Columns __attribute__((vector_size(kPanelWidth * 4)));
typedef int32_t IntColumns __attribute__((vector_size(kPanelWidth * 4)));

#define LLMOPT_INLINE inline __attribute__((always_inline))

LLMOPT_INLINE Columns splat(float x) { return Columns{} + x; }
LLMOPT_INLINE Columns smaller(Columns a, Columns b) { return a < b ? a : b; }
LLMOPT_INLINE Columns larger(Columns a, Columns b) { return a > b ? a : b; }
LLMOPT_INLINE Columns magnitude(Columns a) { return larger(a, -a); }
// To the nearest whole number, ties to even, for |a| below 2^22.
LLMOPT_INLINE Columns round(Columns a) { return (a + 12582912.0f) - 12582912.0f; }
LLMOPT_INLINE Columns rounded(Columns a, float low, float high) {
  return larger(splat(low), smaller(splat(high), round(a)));
}
// 1 / a, or 0 where there is nothing to divide by.
LLMOPT_INLINE Columns inverse_of(Columns a) {
  const Columns one = splat(1.0f);
  const IntColumns usable = magnitude(a) > splat(1e-37f);
  return usable ? one / (usable ? a : one) : Columns{};
}
LLMOPT_INLINE Columns through_float16(Columns a) {
  Columns b;
  for (int c = 0; c < kPanelWidth; ++c) b[c] = from_float16(to_float16(a[c]));
  return b;
}

// Values of k of all columns; those past the matrix are not in it.
struct Span {
  const Columns* w;
  const float* importance;  // or null
  int64_t count;
};

template <bool kWeighted>
LLMOPT_INLINE Columns weighted(Columns a, const Span& span, int64_t k) {
  if constexpr (kWeighted) return a * span.importance[k];
  return a;
}

// Symmetric: q in low..high. `inverses` are candidates of 1 / scale.
template <bool kWeighted>
Columns fit_scale(const Span& span, float low, float high, const Columns* inverses, int num_inverses) {
  Columns best_scale{}, best_gain{};
  const auto consider = [&](Columns inverse) {
    Columns wq{}, qq{};
    for (int64_t k = 0; k < span.count; ++k) {
      const Columns q = rounded(span.w[k] * inverse, low, high), weighted_q = weighted<kWeighted>(q, span, k);
      wq += span.w[k] * weighted_q;
      qq += q * weighted_q;
    }
    // The scale of least squares for these q leaves sum w^2 - gain.
    const Columns scale = wq * inverse_of(qq), gain = scale * wq;
    const IntColumns better = gain > best_gain;
    best_gain = better ? gain : best_gain;
    best_scale = better ? scale : best_scale;
  };
  for (int i = 0; i < num_inverses; ++i) consider(inverses[i]);
  consider(inverse_of(best_scale));
  return best_scale;
}

// With minimum: w = scale * q + minimum, q in 0..15.
template <bool kWeighted>
void fit_line(const Span& span, Columns* scale_out, Columns* minimum_out, Columns* plain_scale,
              Columns* plain_minimum) {
  Columns low = span.w[0], high = span.w[0];
  for (int64_t k = 1; k < span.count; ++k) {
    low = smaller(low, span.w[k]);
    high = larger(high, span.w[k]);
  }
  // Sums run over w - low, which loses less to rounding.
  Columns sum_w{};
  float count = 0;
  for (int64_t k = 0; k < span.count; ++k) {
    sum_w += weighted<kWeighted>(span.w[k] - low, span, k);
    count += kWeighted ? span.importance[k] : 1.0f;
  }
  const Columns range = high - low, per_range = inverse_of(range), total = splat(count);
  Columns best_scale = range / 15.0f, best_minimum{}, best_gain = splat(-1e38f);
  const auto consider = [&](Columns inverse, Columns offset) {
    Columns q_sum{}, qq{}, wq{};
    for (int64_t k = 0; k < span.count; ++k) {
      const Columns w = span.w[k] - low, q = rounded((w - offset) * inverse, 0.0f, 15.0f);
      const Columns weighted_q = weighted<kWeighted>(q, span, k);
      q_sum += weighted_q;
      qq += q * weighted_q;
      wq += w * weighted_q;
    }
    const Columns per_determinant = inverse_of(total * qq - q_sum * q_sum);
    const Columns scale = (total * wq - q_sum * sum_w) * per_determinant;
    const Columns minimum = (qq * sum_w - q_sum * wq) * per_determinant;
    const Columns gain = scale * wq + minimum * sum_w;  // leaves sum (w - low)^2 - gain
    const IntColumns better = (gain > best_gain) & (scale > Columns{});
    best_gain = better ? gain : best_gain;
    best_scale = better ? scale : best_scale;
    best_minimum = better ? minimum : best_minimum;
  };
  for (float steps : {13.5f, 14.0f, 14.4f, 14.7f, 15.0f, 15.3f, 15.7f, 16.2f}) consider(per_range * steps, Columns{});
  for (int again = 0; again < 2; ++again) consider(inverse_of(best_scale), best_minimum);
  *scale_out = best_scale;
  *minimum_out = best_minimum + low;
  *plain_scale = range / 15.0f;
  *plain_minimum = low;
}

// The better one of parameters as stored: `scale` and `minimum` are replaced where the others leave less error.
template <bool kWeighted>
void keep_better(const Span& span, float low, float high, Columns* scale, Columns* minimum, Columns other_scale,
                 Columns other_minimum) {
  const auto error_of = [&](Columns s, Columns m) {
    const Columns inverse = inverse_of(s);
    Columns error{};
    for (int64_t k = 0; k < span.count; ++k) {
      const Columns rest = span.w[k] - m - s * rounded((span.w[k] - m) * inverse, low, high);
      error += rest * weighted<kWeighted>(rest, span, k);
    }
    return error;
  };
  const IntColumns better = error_of(other_scale, other_minimum) < error_of(*scale, *minimum);
  *scale = better ? other_scale : *scale;
  *minimum = better ? other_minimum : *minimum;
}

void store_float16(Columns a, std::byte* to) {
  uint16_t half[kPanelWidth];
  for (int c = 0; c < kPanelWidth; ++c) half[c] = to_float16(a[c]);
  std::memcpy(to, half, sizeof(half));
}

// Four values of k of all columns, as bytes of 16 words.
LLMOPT_INLINE IntColumns quad(const IntColumns* q) { return q[0] | (q[1] << 8) | (q[2] << 16) | (q[3] << 24); }

LLMOPT_INLINE void store_row(IntColumns row, std::byte* to) { std::memcpy(to, &row, sizeof(row)); }

// q: a multiple of 8 values of k, 0..255 or 0..15
void store_bytes(const IntColumns* q, int64_t count, std::byte* to) {
  for (int64_t k = 0; k < count; k += 4) store_row(quad(q + k), to + k * kPanelWidth);
}
void store_nibbles(const IntColumns* q, int64_t count, std::byte* to) {
  for (int64_t k = 0; k < count; k += 8) store_row(quad(q + k) | (quad(q + k + 4) << 4), to + k * kPanelWidth / 2);
}

void quantize(const Span& span, Columns inverse, Columns minimum, float low, float high, int zero, IntColumns* q) {
  for (int64_t k = 0; k < span.count; ++k) {
    q[k] = __builtin_convertvector(rounded((span.w[k] - minimum) * inverse, low, high), IntColumns) + zero;
  }
}

// The element of largest magnitude, with its sign.
Columns extreme_of(const Span& span) {
  Columns extreme{};
  for (int64_t k = 0; k < span.count; ++k) {
    extreme = magnitude(span.w[k]) > magnitude(extreme) ? span.w[k] : extreme;
  }
  return extreme;
}

template <bool kWeighted>
void pack_column_scales(const Span& span, int64_t padded_count, IntColumns* q, std::byte* panel) {
  const Columns inverse = 127.0f * inverse_of(extreme_of(span));
  Columns candidates[6];
  int n = 0;
  for (float clip : {1.0f, 0.95f, 0.9f, 0.8f, 0.7f, 0.6f}) candidates[n++] = inverse / clip;
  const Columns scale = magnitude(fit_scale<kWeighted>(span, -127.0f, 127.0f, candidates, n));
  quantize(span, inverse_of(scale), Columns{}, -127.0f, 127.0f, kZero8, q);
  store_bytes(q, padded_count, panel);
  std::memcpy(panel + padded_count * kPanelWidth, &scale, sizeof(scale));
}

// The q of a weight of zero, where there is one.
int zero_of(const MatrixShape& shape) {
  return shape.format != WeightFormat::kInt4Group ? kZero8 : shape.has_minimum ? 0 : kZero4;
}

template <bool kWeighted>
void pack_group(const MatrixShape& shape, const Span& span, IntColumns* q, std::byte* values, std::byte* scales) {
  Columns scale{}, minimum{};
  float low = 0.0f, high = 15.0f;
  if (shape.has_minimum) {
    Columns plain_scale, plain_minimum;
    fit_line<kWeighted>(span, &scale, &minimum, &plain_scale, &plain_minimum);
    scale = through_float16(scale);
    minimum = through_float16(minimum);
    keep_better<kWeighted>(span, low, high, &scale, &minimum, through_float16(plain_scale),
                           through_float16(plain_minimum));
    store_float16(minimum, scales + kParameterBytes);
  } else {
    const Columns extreme = extreme_of(span), inverse = inverse_of(extreme);
    Columns candidates[14];
    int n = 0;
    if (shape.format == WeightFormat::kInt8Group) {
      low = -127.0f;
      high = 127.0f;
      for (float steps : {127.5f, 127.0f, 126.0f, 125.0f}) candidates[n++] = inverse * steps;
    } else {
      low = -8.0f;
      high = 7.0f;
      for (float steps : {-7.0f, -7.4f, -7.7f, -8.0f, -8.3f, -8.6f, -9.0f, -9.4f}) candidates[n++] = inverse * steps;
      for (float steps : {7.0f, 7.3f, 7.6f, 8.0f, 8.4f, 8.8f}) candidates[n++] = inverse * steps;
    }
    scale = through_float16(fit_scale<kWeighted>(span, low, high, candidates, n));
    keep_better<kWeighted>(span, low, high, &scale, &minimum, through_float16(extreme / high), Columns{});
  }
  quantize(span, inverse_of(scale), minimum, low, high, zero_of(shape), q);
  store_float16(scale, scales);
  if (shape.format == WeightFormat::kInt8Group) {
    store_bytes(q, shape.group_size, values);
  } else {
    store_nibbles(q, shape.group_size, values);
  }
}

LLMOPT_INLINE float element(const float* from) { return *from; }
LLMOPT_INLINE float element_bfloat16(const uint16_t* from) {
  return std::bit_cast<float>(static_cast<uint32_t>(*from) << 16);
}

// Values [begin, begin + count) of k of every column.
template <class Element, class Convert>
void load_columns(const SourceRows& source, Convert convert, int64_t begin, int64_t count, Columns* out) {
  constexpr int64_t kBlock = 64;  // of k: what is written for one column is still near for the next
  auto* to = reinterpret_cast<float*>(out);
  const int64_t stride = source.element_stride;
  for (int64_t block = 0; block < count; block += kBlock) {
    const int64_t end = std::min(count, block + kBlock);
    for (int c = 0; c < kPanelWidth; ++c) {
      const auto* row = static_cast<const Element*>(source.rows[c]);
      for (int64_t k = block; k < end; ++k) {
        to[k * kPanelWidth + c] = row ? convert(row[(begin + k) * stride]) : 0.0f;
      }
    }
  }
}

void load_columns(const SourceRows& source, int64_t begin, int64_t count, Columns* out) {
  switch (source.type) {
    case SourceType::kFloat32:
      return load_columns<float>(source, [](float x) { return x; }, begin, count, out);
    case SourceType::kBFloat16:
      return load_columns<uint16_t>(
          source, [](uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }, begin, count, out);
    case SourceType::kFloat16:
      return load_columns<uint16_t>(source, from_float16, begin, count, out);
  }
}

template <bool kWeighted>
void pack(const MatrixShape& shape, const SourceRows& source, std::byte* panel) {
  const int64_t count = shape.num_inputs;
  const int64_t piece = shape.format == WeightFormat::kInt8 ? padded_inputs(shape) : shape.group_size;
  std::vector<Columns> columns(piece);
  std::vector<IntColumns> q(piece, IntColumns{} + zero_of(shape));
  if (shape.format == WeightFormat::kInt8) {
    load_columns(source, 0, count, columns.data());
    return pack_column_scales<kWeighted>({columns.data(), source.importance, count}, piece, q.data(), panel);
  }
  const GroupLayout layout(shape);
  std::memset(panel, 0, layout.panel_bytes());
  for (int64_t g = 0; g < layout.num_groups; ++g) {
    const int64_t begin = g * piece, in_group = std::min(piece, count - begin);
    if (in_group <= 0) break;  // padding: a scale of zero
    if (in_group < piece) std::fill(q.begin(), q.end(), IntColumns{} + zero_of(shape));
    load_columns(source, begin, in_group, columns.data());
    const Span span{columns.data(), kWeighted ? source.importance + begin : nullptr, in_group};
    pack_group<kWeighted>(shape, span, q.data(), panel + layout.values(g), panel + layout.scales(g));
  }
}

[[noreturn]] void refuse(const MatrixShape& shape, const std::string& need) {
  throw std::invalid_argument("A matrix of " + std::to_string(shape.num_outputs) + " x " +
                              std::to_string(shape.num_inputs) + " in format " + name(shape.format) +
                              " was asked for with group size " + std::to_string(shape.group_size) +
                              (shape.has_minimum ? " and minimums" : "") + "; " + need + ".");
}

// Beyond what input_padding() refuses.
void check_shape(const MatrixShape& shape) {
  if (shape.has_minimum && shape.format != WeightFormat::kInt4Group) refuse(shape, "only int4_group has minimums");
  // 255 * 127 per value in 32 bits.
  if (shape.format == WeightFormat::kInt8 && shape.num_inputs > 65536) refuse(shape, "sums hold 65536 inputs at most");
}

}  // namespace

void pack_panel_int(const MatrixShape& shape, const SourceRows& source, std::byte* panel) {
  check_shape(shape);
  if (source.importance) {
    pack<true>(shape, source, panel);
  } else {
    pack<false>(shape, source, panel);
  }
}

void unpack_column_int(const MatrixShape& shape, const std::byte* panel, int column, float* out) {
  const int64_t count = shape.num_inputs;
  if (shape.format == WeightFormat::kInt8) {
    float scale;
    std::memcpy(&scale, panel + padded_inputs(shape) * kPanelWidth + column * 4, 4);
    for (int64_t k = 0; k < count; ++k) {
      out[k] = scale * static_cast<float>(static_cast<int>(panel[byte_of(k, column)]) - kZero8);
    }
    return;
  }
  const GroupLayout layout(shape);
  const auto half_at = [&](int64_t offset) {
    uint16_t half;
    std::memcpy(&half, panel + offset + column * 2, 2);
    return from_float16(half);
  };
  for (int64_t g = 0, begin = 0; begin < count; ++g, begin += shape.group_size) {
    const std::byte* values = panel + layout.values(g);
    const float scale = half_at(layout.scales(g));
    const float minimum = shape.has_minimum ? half_at(layout.scales(g) + kParameterBytes) : 0.0f;
    const int64_t in_group = std::min<int64_t>(shape.group_size, count - begin);
    for (int64_t k = 0; k < in_group; ++k) {
      const int q = shape.format == WeightFormat::kInt8Group
                        ? static_cast<int>(values[byte_of(k, column)])
                        : static_cast<int>(values[nibble_byte(k, column)]) >> nibble_shift(k) & 15;
      out[begin + k] = scale * static_cast<float>(q - zero_of(shape)) + minimum;
    }
  }
}

}  // namespace llmopt::matmul

namespace llmopt {

void pack_quantized_panel(const MatrixShape& shape, const QuantizedRows& source, std::byte* panel) {
  using namespace matmul;
  check_shape(shape);
  if (shape.format != WeightFormat::kInt8Group && shape.format != WeightFormat::kInt4Group) {
    refuse(shape, "pack_quantized_panel() packs int8_group and int4_group");
  }
  const GroupLayout layout(shape);
  std::memset(panel, 0, layout.panel_bytes());
  for (int64_t g = 0, begin = 0; begin < shape.num_inputs; ++g, begin += shape.group_size) {
    const int64_t in_group = std::min<int64_t>(shape.group_size, shape.num_inputs - begin);
    std::byte* values = panel + layout.values(g);
    for (int c = 0; c < kPanelWidth; ++c) {
      if (source.values[c] == nullptr) continue;  // a scale of zero
      const auto store_half = [&](float x, std::byte* to) {
        const uint16_t half = to_float16(x);
        std::memcpy(to + c * 2, &half, 2);
      };
      store_half(source.scales[c][g], panel + layout.scales(g));
      if (shape.has_minimum) store_half(source.minimums[c][g], panel + layout.scales(g) + kParameterBytes);
      const uint8_t* from = source.values[c] + begin;
      if (shape.format == WeightFormat::kInt8Group) {
        for (int64_t k = 0; k < in_group; ++k) values[byte_of(k, c)] = static_cast<std::byte>(from[k] ^ kZero8);
      } else {
        for (int64_t k = 0; k < in_group; ++k) {
          values[nibble_byte(k, c)] |= static_cast<std::byte>((from[k] & 15) << nibble_shift(k));
        }
      }
    }
  }
}

}  // namespace llmopt
