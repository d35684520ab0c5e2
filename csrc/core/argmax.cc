#include "llmopt/argmax.h"

#include <cmath>
#include <limits>

namespace llmopt {
namespace {

// Wide enough for several vectors of any instruction set, so that the loop below is bound by memory and not by the
// latency of one maximum after the other.
constexpr int kLanes = 64;

}  // namespace

// The loader picks the clone. The result does not depend on it, so LLMOPT_ISA has no say here.
// The thread sanitizer is not ready yet when the loader picks.
#if defined(LLMOPT_X86) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
__attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
Best argmax(const float* row, int64_t size) {
  // First pass: the largest value, and whether anything is NaN. Comparisons with NaN are false, so NaN never wins here.
  float best[kLanes];
  int32_t nan[kLanes] = {};
  for (float& lane : best) lane = -std::numeric_limits<float>::infinity();
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float x = row[i + lane];
      best[lane] = x > best[lane] ? x : best[lane];
      nan[lane] |= x != x;
    }
  }
  float top = best[0];
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    top = best[lane] > top ? best[lane] : top;
    has_nan |= nan[lane] != 0;
  }
  for (int64_t i = whole; i < size; ++i) {
    top = row[i] > top ? row[i] : top;
    has_nan |= row[i] != row[i];
  }
  // Second pass: where it stands. On average half of the row, which is in the cache by now.
  int64_t start = 0;
  for (; !has_nan && start < whole; start += kLanes) {
    int32_t hit = 0;
    for (int lane = 0; lane < kLanes; ++lane) hit |= row[start + lane] == top;
    if (hit) break;
  }
  for (int64_t i = start; i < size; ++i) {
    if (has_nan ? std::isnan(row[i]) : row[i] == top) return {i, row[i]};
  }
  return {0, row[0]};  // not reached: a row without NaN holds its largest value
}

}  // namespace llmopt
