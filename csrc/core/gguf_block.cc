#include "llmopt/gguf_block.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/linear/half.h"

namespace llmopt {
namespace {

constexpr int kSuperBlock = 256;  // values in a block of the K formats

float half_at(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, 2);
  return from_float16(half);
}

// 16 bytes of two values each: the low halves are the first 16 values, the high halves the other 16.
void split_halves(const uint8_t* bytes, uint8_t* values) {
  for (int i = 0; i < 16; ++i) {
    values[i] = bytes[i] & 15;
    values[i + 16] = bytes[i] >> 4;
  }
}

// float16 d, 16 bytes: w = d (q - 8)
void decode_q4_0(const uint8_t* block, uint8_t* values, float* scales) {
  scales[0] = half_at(block);
  split_halves(block + 2, values);
}

// float16 d, float16 m, 16 bytes: w = d q + m
void decode_q4_1(const uint8_t* block, uint8_t* values, float* scales, float* minimums) {
  scales[0] = half_at(block);
  minimums[0] = half_at(block + 2);
  split_halves(block + 4, values);
}

// float16 d, 32 int8: w = d q
void decode_q8_0(const uint8_t* block, uint8_t* values, float* scales) {
  scales[0] = half_at(block);
  std::memcpy(values, block + 2, 32);
}

// float16 d, float16 dmin, 12 bytes of 8 scales s and 8 minimums m of 6 bits, 128 bytes of values, 64 values per 32
// bytes, low halves first: w = d s q - dmin m. The first 4 scales and minimums lie in the low 6 bits of bytes 0-3 and
// 4-7; the low 4 bits of the others in bytes 8-11 (scale low, minimum high), their high 2 bits on top of bytes 0-7.
void decode_q4_k(const uint8_t* block, uint8_t* values, float* scales, float* minimums) {
  const float d = half_at(block), dmin = half_at(block + 2);
  const uint8_t* packed = block + 4;
  for (int g = 0; g < 8; ++g) {
    int scale, minimum;
    if (g < 4) {
      scale = packed[g] & 63;
      minimum = packed[g + 4] & 63;
    } else {
      scale = (packed[g + 4] & 15) | (packed[g - 4] >> 6 << 4);
      minimum = (packed[g + 4] >> 4) | (packed[g] >> 6 << 4);
    }
    scales[g] = d * static_cast<float>(scale);
    minimums[g] = -(dmin * static_cast<float>(minimum));
  }
  const uint8_t* bytes = block + 16;
  for (int part = 0; part < 4; ++part, bytes += 32, values += 64) {
    for (int i = 0; i < 32; ++i) {
      values[i] = bytes[i] & 15;
      values[i + 32] = bytes[i] >> 4;
    }
  }
}

// 128 bytes with the low 4 bits, 64 bytes with the high 2 bits, 16 int8 scales s, float16 d: w = d s (q - 32).
// For each half of 128 values: value 32 i + j has its low bits in byte 32 (i % 2) + j (low half for i < 2), its high
// bits at 2 i of byte j.
void decode_q6_k(const uint8_t* block, uint8_t* values, float* scales) {
  const uint8_t *low = block, *high = block + 128, *packed = block + 192;
  const float d = half_at(block + 208);
  for (int g = 0; g < 16; ++g) scales[g] = d * static_cast<float>(static_cast<int8_t>(packed[g]));
  for (int half = 0; half < 2; ++half, low += 64, high += 32, values += 128) {
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 32; ++j) {
        const int byte = low[i % 2 * 32 + j];
        const int q = (i < 2 ? byte & 15 : byte >> 4) | ((high[j] >> (2 * i) & 3) << 4);
        values[i * 32 + j] = static_cast<uint8_t>(static_cast<int8_t>(q - 32));
      }
    }
  }
}

void decode_block(GgufType type, const uint8_t* block, uint8_t* values, float* scales, float* minimums) {
  switch (type) {
    case GgufType::kQ4_0:
      return decode_q4_0(block, values, scales);
    case GgufType::kQ4_1:
      return decode_q4_1(block, values, scales, minimums);
    case GgufType::kQ8_0:
      return decode_q8_0(block, values, scales);
    case GgufType::kQ4_K:
      return decode_q4_k(block, values, scales, minimums);
    case GgufType::kQ6_K:
      return decode_q6_k(block, values, scales);
    default:
      throw std::invalid_argument("GGUF type " + std::to_string(static_cast<uint32_t>(type)) + " is not quantized.");
  }
}

void check_inputs(const GgufLayout& layout, int64_t num_inputs) {
  if (num_inputs % layout.block_values != 0) {
    throw std::invalid_argument("a row of " + std::to_string(num_inputs) + " values is no multiple of the block of " +
                                std::to_string(layout.block_values) + " values.");
  }
}

}  // namespace

GgufLayout gguf_layout(GgufType type) {
  switch (type) {
    case GgufType::kFloat32:
      return {1, 4};
    case GgufType::kFloat16:
    case GgufType::kBFloat16:
      return {1, 2};
    case GgufType::kQ4_0:
      return {32, 18, WeightFormat::kInt4Group, 32};
    case GgufType::kQ4_1:
      return {32, 20, WeightFormat::kInt4Group, 32, true};
    case GgufType::kQ8_0:
      return {32, 34, WeightFormat::kInt8Group, 32};
    case GgufType::kQ4_K:
      return {kSuperBlock, 144, WeightFormat::kInt4Group, 32, true};
    case GgufType::kQ6_K:
      return {kSuperBlock, 210, WeightFormat::kInt8Group, 16};
  }
  throw std::invalid_argument("GGUF type " + std::to_string(static_cast<uint32_t>(type)) + " is not read.");
}

void decode_gguf_row(GgufType type, const std::byte* row, int64_t num_inputs, uint8_t* values, float* scales,
                     float* minimums) {
  const GgufLayout layout = gguf_layout(type);
  check_inputs(layout, num_inputs);
  const auto* block = reinterpret_cast<const uint8_t*>(row);
  for (int64_t k = 0; k < num_inputs; k += layout.block_values, block += layout.block_bytes) {
    const int64_t group = layout.group_size == 0 ? 0 : k / layout.group_size;
    decode_block(type, block, values + k, scales + group, layout.has_minimum ? minimums + group : nullptr);
  }
}

void dequantize_gguf_row(GgufType type, const std::byte* row, int64_t num_inputs, float* out) {
  const GgufLayout layout = gguf_layout(type);
  check_inputs(layout, num_inputs);
  const auto* bytes = reinterpret_cast<const uint8_t*>(row);
  if (layout.group_size == 0) {
    for (int64_t k = 0; k < num_inputs; ++k, bytes += layout.block_bytes) {
      if (type == GgufType::kFloat16) {
        out[k] = half_at(bytes);
      } else {  // a bfloat16 is the upper half of a float32
        const size_t missing = 4 - layout.block_bytes;
        char value[4] = {};
        std::memcpy(value + missing, bytes, layout.block_bytes);
        std::memcpy(out + k, value, 4);
      }
    }
    return;
  }
  uint8_t values[kSuperBlock];
  float scales[kSuperBlock / 16], minimums[kSuperBlock / 16];
  for (int64_t begin = 0; begin < num_inputs; begin += layout.block_values, bytes += layout.block_bytes) {
    decode_block(type, bytes, values, scales, minimums);
    for (int i = 0; i < layout.block_values; ++i) {
      const int group = i / layout.group_size;
      const int q = layout.format == WeightFormat::kInt8Group ? static_cast<int8_t>(values[i])
                    : layout.has_minimum                      ? values[i]
                                                              : values[i] - 8;
      const float product = scales[group] * static_cast<float>(q);
      out[begin + i] = layout.has_minimum ? product + minimums[group] : product;
    }
  }
}

}  // namespace llmopt
