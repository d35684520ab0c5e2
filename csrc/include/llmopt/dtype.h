// Element types of caches and activations.
#pragma once

#include <cstddef>
#include <cstdint>

namespace llmopt {

enum class DType : uint8_t { kFloat32, kBFloat16 };

constexpr size_t item_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
constexpr const char* name(DType dtype) { return dtype == DType::kFloat32 ? "float32" : "bfloat16"; }

}  // namespace llmopt
