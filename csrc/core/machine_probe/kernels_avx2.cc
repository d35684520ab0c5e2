#include <immintrin.h>

#include "core/machine_probe/loops.h"

namespace llmopt::machine_probe {
namespace {

// Without VNNI a dot product of bytes is three instructions: pairs of products, pairs of sums, and the addition.
float dot_i8(int64_t iterations) {
  __m256i accumulators[8] = {}, bytes = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1);
  for (int64_t round = 0; round < iterations; ++round) {
#pragma GCC unroll 8
    for (__m256i& accumulator : accumulators) {
      asm volatile("" : "+x"(bytes));  // otherwise one product would serve all
      const __m256i products = _mm256_maddubs_epi16(bytes, bytes);
      accumulator = _mm256_add_epi32(accumulator, _mm256_madd_epi16(products, ones));
    }
  }
  __m256i total{};
  for (__m256i accumulator : accumulators) total = _mm256_add_epi32(total, accumulator);
  return static_cast<float>(total[0]);
}

}  // namespace

const Kernels& avx2_kernels() {
  static const Kernels kernels = [] {
    Kernels made = make_kernels();
    made.int8_dot = {2.0 * 8 * 32, dot_i8};
    return made;
  }();
  return kernels;
}

}  // namespace llmopt::machine_probe
