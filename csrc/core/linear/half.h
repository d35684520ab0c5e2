// IEEE 754 half precision by hand: the parameters of grouped formats are stored in it, and weights may come in it.
#pragma once

#include <bit>
#include <cstdint>

namespace llmopt {
namespace {  // kernel sources include this, each with its own compiler flags

inline float from_float16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  if ((half & 0x7c00) == 0x7c00) return std::bit_cast<float>(sign | magnitude | 0x7f800000);  // infinity, NaN
  // The exponent's bias differs by 112; the product also makes a denormal half a normal float.
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f));
}

// To the nearest, ties to even; what is too large becomes the largest finite value.
inline uint16_t to_float16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);  // NaN
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7bff);
  if (magnitude < 0x38800000) {  // denormal: let the addition shift and round
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000));
  }
  magnitude += 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000) >> 13));
}

}  // namespace
}  // namespace llmopt
