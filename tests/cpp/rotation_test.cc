// The rotation of keys and queries against the matrix in double, with the instruction set that LLMOPT_ISA names.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "core/attention/kernels.h"

namespace llmopt {
namespace {

// Row i, column j of a Hadamard matrix is -1 where the bits that i and j have in common are odd in number.
std::vector<double> rotated(const std::vector<float>& x) {
  const int n = static_cast<int>(x.size()), size = n & -n;
  std::vector<double> out(x.size());
  for (int i = 0; i < n; ++i) {
    const int first = i / size * size;
    for (int j = 0; j < size; ++j) out[i] += (__builtin_popcount((i - first) & j) % 2 ? -1.0 : 1.0) * x[first + j];
    out[i] /= std::sqrt(static_cast<double>(size));
  }
  return out;
}

class Rotation : public ::testing::TestWithParam<int> {};

TEST_P(Rotation, IsTheHadamardMatrixOfEachGroupOfElements) {
  const int n = GetParam();
  const attention::Kernels& kernels = attention::kernels(selected_isa());
  std::mt19937 random(n);
  std::normal_distribution<float> normal;
  std::unique_ptr<uint16_t[]> half(new uint16_t[n]);  // of exactly their size
  std::unique_ptr<float[]> row(new float[n]), found(new float[n]);
  std::vector<float> x(n);
  for (int i = 0; i < n; ++i) {
    float value = normal(random);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    half[i] = static_cast<uint16_t>(bits >> 16);
    bits &= 0xffff0000;
    std::memcpy(&x[i], &bits, 4);
    row[i] = x[i];
  }
  const std::vector<double> wanted = rotated(x);
  kernels.rotate_row_bf16(half.get(), n, found.get());
  for (int i = 0; i < n; ++i) ASSERT_NEAR(found[i], wanted[i], 1e-5) << "column " << i;
  kernels.rotate_row_f32(row.get(), n, row.get());
  ASSERT_EQ(std::memcmp(row.get(), found.get(), n * sizeof(float)), 0);
  kernels.rotate_row_f32(row.get(), n, found.get());
  for (int i = 0; i < n; ++i) ASSERT_NEAR(found[i], x[i], 1e-5) << "back, column " << i;
}

INSTANTIATE_TEST_SUITE_P(Sizes, Rotation,
                         ::testing::Values(1, 2, 3, 4, 6, 8, 12, 16, 20, 32, 40, 64, 72, 80, 96, 112, 128, 192, 256,
                                           300, 512));

}  // namespace
}  // namespace llmopt
