// Loops in vector types of the compiler. Included by sources that differ in their compiler flags.
#pragma once

#include <cstring>

#include "core/machine_probe/kernels.h"

namespace llmopt::machine_probe {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

typedef uint64_t Words __attribute__((vector_size(kVectorBytes), may_alias));
typedef float Floats __attribute__((vector_size(kVectorBytes)));

// Memory is asked for this far ahead, since the hardware's own prefetch stops at the end of a 4 KB page.
constexpr int kPrefetchBytes = 4096;

// The loops below hold as many independent accumulators as hide the latency of an instruction and fit the registers.
constexpr int kNumSums = 8, kNumAccumulators = 12;

uint64_t sum_words(const uint64_t* words, size_t count) {
  Words sums[kNumSums] = {};
  constexpr int kVectors = kSumWords * sizeof(uint64_t) / kVectorBytes;
  static_assert(kVectors % kNumSums == 0);
  for (size_t at = 0; at < count; at += kSumWords) {
    const auto* vectors = reinterpret_cast<const Words*>(words + at);
    const auto* ahead = reinterpret_cast<const char*>(vectors) + kPrefetchBytes;
    for (size_t line = 0; line < kSumWords * sizeof(uint64_t); line += 64) __builtin_prefetch(ahead + line);
#pragma GCC unroll 32
    for (int i = 0; i < kVectors; ++i) sums[i % kNumSums] += vectors[i];
  }
  uint64_t total = 0;
  for (const Words& sum : sums) {
    for (size_t lane = 0; lane < kVectorBytes / sizeof(uint64_t); ++lane) total += sum[lane];
  }
  return total;
}

float multiply_add_f32(int64_t iterations) {
  Floats accumulators[kNumAccumulators];
  for (int i = 0; i < kNumAccumulators; ++i) accumulators[i] = Floats{} + static_cast<float>(i);
  // x -> 0.5 x + 0.25 stays an ordinary number for ever
  Floats factor = Floats{} + 0.5f, addend = Floats{} + 0.25f;
  for (int64_t round = 0; round < iterations; ++round) {
#pragma GCC unroll 12
    for (Floats& accumulator : accumulators) accumulator = accumulator * factor + addend;
  }
  Floats total{};
  for (const Floats& accumulator : accumulators) total += accumulator;
  return total[0];
}

Kernels make_kernels() {
  Kernels kernels;
  kernels.sum = sum_words;
  kernels.float32 = {2.0 * kNumAccumulators * kVectorBytes / sizeof(float), multiply_add_f32};
  return kernels;
}

}  // namespace
}  // namespace llmopt::machine_probe
