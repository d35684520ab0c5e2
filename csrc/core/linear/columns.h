// The 16 columns of a panel as lanes of one vector, with the steps that integer kernels are made of. Only for kernel
// sources. One version per instruction set; a row is 64 bytes: four values of k for each column.
#pragma once

#include "core/linear/half.h"
#include "core/linear/int_layout.h"
#include "core/simd.h"

namespace llmopt::matmul {
namespace {

using namespace simd;

// What remains to be subtracted from q after Columns::dot_bytes: the VNNI instruction takes q as it is, the others
// subtract the zero first.
#if defined(__AVX512VNNI__)
constexpr int kByteZero = integer::kZero8;
#else
constexpr int kByteZero = 0;
#endif

#if defined(__AVX512F__)

using Bytes = __m512i;  // one row
using Sums = __m512i;   // int32 per column
using Floats = __m512;

LLMOPT_INLINE Bytes load_row(const std::byte* from) { return _mm512_load_si512(from); }
LLMOPT_INLINE Bytes low_nibbles(Bytes row) { return _mm512_and_si512(row, _mm512_set1_epi8(15)); }
LLMOPT_INLINE Bytes high_nibbles(Bytes row) {
  return _mm512_and_si512(_mm512_srli_epi16(row, 4), _mm512_set1_epi8(15));
}
LLMOPT_INLINE Sums zero_sums() { return _mm512_setzero_si512(); }
LLMOPT_INLINE Sums add(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
template <int kBits>
LLMOPT_INLINE Sums shifted(int32_t x) {
  return _mm512_slli_epi32(_mm512_set1_epi32(x), kBits);
}

LLMOPT_INLINE Bytes quad_of(const int8_t* x) {
  int32_t quad;
  std::memcpy(&quad, x, 4);
  return _mm512_set1_epi32(quad);
}
#if defined(__AVX512VNNI__)
LLMOPT_INLINE Sums dot_nibbles(Sums sums, Bytes q, const int8_t* x) { return _mm512_dpbusd_epi32(sums, q, quad_of(x)); }
LLMOPT_INLINE Sums dot_bytes(Sums sums, Bytes q, const int8_t* x) { return _mm512_dpbusd_epi32(sums, q, quad_of(x)); }
#else
// Pairs of products of 0..15 and -127..127 fit in 16 bits.
LLMOPT_INLINE Sums dot_nibbles(Sums sums, Bytes q, const int8_t* x) {
  const __m512i pairs = _mm512_maddubs_epi16(q, quad_of(x));
  return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
// |w| * (x with the sign of w): two products are at most 2 * 128 * 127, which fits in 16 bits, where 255 would not.
LLMOPT_INLINE Sums dot_bytes(Sums sums, Bytes q, const int8_t* x) {
  const __m512i w = _mm512_xor_si512(q, _mm512_set1_epi8(-128)), quad = quad_of(x);
  const __m512i signed_x = _mm512_mask_sub_epi8(quad, _mm512_movepi8_mask(w), _mm512_setzero_si512(), quad);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), signed_x);
  return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#endif

LLMOPT_INLINE Floats zero_floats() { return _mm512_setzero_ps(); }
LLMOPT_INLINE Floats floats_of(float x) { return _mm512_set1_ps(x); }
LLMOPT_INLINE Floats to_floats(Sums sums) { return _mm512_cvtepi32_ps(sums); }
LLMOPT_INLINE Floats load_floats(const std::byte* from) { return _mm512_loadu_ps(from); }
LLMOPT_INLINE Floats load_halves(const std::byte* from) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
}
LLMOPT_INLINE Floats product(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
LLMOPT_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
LLMOPT_INLINE void store_floats(float* to, Floats a) { _mm512_storeu_ps(to, a); }

#elif defined(__AVX2__)

struct Bytes {
  __m256i v[2];
};
using Sums = Bytes;
struct Floats {
  __m256 v[2];
};

LLMOPT_INLINE Bytes load_row(const std::byte* from) {
  return {{_mm256_load_si256(reinterpret_cast<const __m256i*>(from)),
           _mm256_load_si256(reinterpret_cast<const __m256i*>(from) + 1)}};
}
LLMOPT_INLINE __m256i low_nibbles(__m256i row) { return _mm256_and_si256(row, _mm256_set1_epi8(15)); }
LLMOPT_INLINE Bytes low_nibbles(Bytes row) { return {{low_nibbles(row.v[0]), low_nibbles(row.v[1])}}; }
LLMOPT_INLINE Bytes high_nibbles(Bytes row) {
  return {{low_nibbles(_mm256_srli_epi16(row.v[0], 4)), low_nibbles(_mm256_srli_epi16(row.v[1], 4))}};
}
LLMOPT_INLINE Sums zero_sums() { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
LLMOPT_INLINE Sums add(Sums a, Sums b) {
  return {{_mm256_add_epi32(a.v[0], b.v[0]), _mm256_add_epi32(a.v[1], b.v[1])}};
}
template <int kBits>
LLMOPT_INLINE Sums shifted(int32_t x) {
  const __m256i half = _mm256_slli_epi32(_mm256_set1_epi32(x), kBits);
  return {{half, half}};
}

LLMOPT_INLINE __m256i quad_of(const int8_t* x) {
  int32_t quad;
  std::memcpy(&quad, x, 4);
  return _mm256_set1_epi32(quad);
}
// Two products fit in 16 bits: see the callers.
LLMOPT_INLINE __m256i dot_half(__m256i sums, __m256i unsigned_w, __m256i x) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned_w, x), _mm256_set1_epi16(1)));
}
LLMOPT_INLINE Sums dot_nibbles(Sums sums, Bytes q, const int8_t* x) {  // 2 * 15 * 127
  const __m256i quad = quad_of(x);
  return {{dot_half(sums.v[0], q.v[0], quad), dot_half(sums.v[1], q.v[1], quad)}};
}
// |w| * (x with the sign of w): 2 * 128 * 127 fits, where 2 * 255 * 127 would not.
LLMOPT_INLINE __m256i dot_half_bytes(__m256i sums, __m256i q, __m256i x) {
  const __m256i w = _mm256_xor_si256(q, _mm256_set1_epi8(-128));
  return dot_half(sums, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}
LLMOPT_INLINE Sums dot_bytes(Sums sums, Bytes q, const int8_t* x) {
  const __m256i quad = quad_of(x);
  return {{dot_half_bytes(sums.v[0], q.v[0], quad), dot_half_bytes(sums.v[1], q.v[1], quad)}};
}

LLMOPT_INLINE Floats zero_floats() { return {{_mm256_setzero_ps(), _mm256_setzero_ps()}}; }
LLMOPT_INLINE Floats floats_of(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
LLMOPT_INLINE Floats to_floats(Sums sums) { return {{_mm256_cvtepi32_ps(sums.v[0]), _mm256_cvtepi32_ps(sums.v[1])}}; }
LLMOPT_INLINE Floats load_floats(const std::byte* from) {
  const auto* values = reinterpret_cast<const float*>(from);
  return {{_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)}};
}
LLMOPT_INLINE Floats load_halves(const std::byte* from) {
  const auto* halves = reinterpret_cast<const __m128i*>(from);
  return {{_mm256_cvtph_ps(_mm_load_si128(halves)), _mm256_cvtph_ps(_mm_load_si128(halves + 1))}};
}
LLMOPT_INLINE Floats product(Floats a, Floats b) {
  return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}};
}
LLMOPT_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return {{_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])}};
}
LLMOPT_INLINE void store_floats(float* to, Floats a) {
  _mm256_storeu_ps(to, a.v[0]);
  _mm256_storeu_ps(to + 8, a.v[1]);
}

#else

// Vectors of the compiler's own, which it cuts to what the machine has.
typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef int32_t Sums __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

LLMOPT_INLINE Bytes load_row(const std::byte* from) { return load_as<Bytes>(from); }
LLMOPT_INLINE Bytes low_nibbles(Bytes row) { return row & 15; }
LLMOPT_INLINE Bytes high_nibbles(Bytes row) { return row >> 4; }
LLMOPT_INLINE Sums zero_sums() { return Sums{}; }
LLMOPT_INLINE Sums add(Sums a, Sums b) { return a + b; }
template <int kBits>
LLMOPT_INLINE Sums shifted(int32_t x) {
  return Sums{} + x * (1 << kBits);
}

LLMOPT_INLINE Sums dot(Sums sums, Bytes q, const int8_t* x, int zero) {
  const Sums words = reinterpret_cast<Sums>(q);
  sums += ((words & 255) - zero) * x[0];
  sums += ((words >> 8 & 255) - zero) * x[1];
  sums += ((words >> 16 & 255) - zero) * x[2];
  sums += ((words >> 24 & 255) - zero) * x[3];
  return sums;
}
LLMOPT_INLINE Sums dot_nibbles(Sums sums, Bytes q, const int8_t* x) { return dot(sums, q, x, 0); }
LLMOPT_INLINE Sums dot_bytes(Sums sums, Bytes q, const int8_t* x) { return dot(sums, q, x, integer::kZero8); }

LLMOPT_INLINE Floats zero_floats() { return Floats{}; }
LLMOPT_INLINE Floats floats_of(float x) { return Floats{} + x; }
LLMOPT_INLINE Floats to_floats(Sums sums) { return __builtin_convertvector(sums, Floats); }
LLMOPT_INLINE Floats load_floats(const std::byte* from) { return load_as<Floats>(from); }
LLMOPT_INLINE Floats load_halves(const std::byte* from) {
  uint16_t halves[kPanelWidth];
  std::memcpy(halves, from, sizeof(halves));
  Floats a{};
  for (int c = 0; c < kPanelWidth; ++c) a[c] = from_float16(halves[c]);
  return a;
}
LLMOPT_INLINE Floats product(Floats a, Floats b) { return a * b; }
LLMOPT_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
LLMOPT_INLINE void store_floats(float* to, Floats a) { store(to, a); }

#endif

// Minus what unsigned weights with this zero add to the dot products with x.
template <int kZero>
LLMOPT_INLINE Sums first_sums(const int32_t* negative_sum_of_x) {
  if constexpr (kZero == 0) return zero_sums();
  return shifted<kZero == integer::kZero4 ? 3 : 7>(*negative_sum_of_x);
}

}  // namespace
}  // namespace llmopt::matmul
