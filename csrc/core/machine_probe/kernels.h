// What differs between instruction sets in the measurement of a machine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace llmopt::machine_probe {

// Arithmetic on registers. `run` does `iterations` rounds and returns something that depends on all of them.
struct Peak {
  double ops_per_iteration = 0;  // a multiplication and an addition are two
  float (*run)(int64_t iterations) = nullptr;

  explicit operator bool() const { return run != nullptr; }
};

struct Kernels {
  uint64_t (*sum)(const uint64_t* words, size_t count) = nullptr;  // count is a multiple of kSumWords
  Peak float32, bfloat16_dot, bfloat16_tile, int8_dot, int8_tile;  // those that the instruction set has
};

// Words that one round of `sum` reads: 512 bytes.
constexpr size_t kSumWords = 64;

const Kernels& portable_kernels();
#if defined(LLMOPT_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();
const Kernels& amx_kernels();
#endif

}  // namespace llmopt::machine_probe
