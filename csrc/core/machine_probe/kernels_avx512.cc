#include <immintrin.h>

#include "core/machine_probe/loops.h"

namespace llmopt::machine_probe {
namespace {

// As with AVX2, twice as wide.
float dot_i8(int64_t iterations) {
  __m512i accumulators[kNumAccumulators] = {}, bytes = _mm512_set1_epi8(1), ones = _mm512_set1_epi16(1);
  for (int64_t round = 0; round < iterations; ++round) {
#pragma GCC unroll 12
    for (__m512i& accumulator : accumulators) {
      asm volatile("" : "+v"(bytes));  // otherwise one product would serve all
      const __m512i products = _mm512_maddubs_epi16(bytes, bytes);
      accumulator = _mm512_add_epi32(accumulator, _mm512_madd_epi16(products, ones));
    }
  }
  __m512i total{};
  for (__m512i accumulator : accumulators) total = _mm512_add_epi32(total, accumulator);
  return static_cast<float>(total[0]);
}

}  // namespace

const Kernels& avx512_kernels() {
  static const Kernels kernels = [] {
    Kernels made = make_kernels();
    made.int8_dot = {2.0 * kNumAccumulators * 64, dot_i8};
    return made;
  }();
  return kernels;
}

}  // namespace llmopt::machine_probe
