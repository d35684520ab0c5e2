#include <cstdint>
#include <cstring>

#include "core/machine_probe/dots_avx512_bf16.h"
#include "core/tiles.h"

namespace llmopt::machine_probe {
namespace {

// Sums in 0 to 3, operands in 4 to 7. The operands are numbers of either sign and many bit patterns: products of zeros
// draw less power, so the clock is higher and the peak a tenth too good.
template <class T>
void load_tiles(const T (&values)[4][1024 / sizeof(T)]) {
  enter_tiles();
  asm volatile("" : : "r"(values) : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, values[0], 64);
  _tile_loadd(5, values[1], 64);
  _tile_loadd(6, values[2], 64);
  _tile_loadd(7, values[3], 64);
}

// Numbers between -1 and 1 as bfloat16, or any int8.
template <class T>
void fill(T (&values)[4][1024 / sizeof(T)]) {
  uint32_t state = 1;
  for (auto& tile : values) {
    for (T& value : tile) {
      state = state * 1664525u + 1013904223u;
      if constexpr (sizeof(T) == 1) {
        value = static_cast<T>(state >> 24);
      } else {
        const float number = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
        uint32_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        value = static_cast<T>(bits >> 16);
      }
    }
  }
}

float first_sum() {
  alignas(64) float rows[16 * 16];
  _tile_stored(0, rows, 64);
  asm volatile("" : : "r"(rows) : "memory");
  leave_tiles();
  return rows[0];
}

// Four accumulators of two tiles times two, as a matrix product uses them.
float tile_bf16(int64_t iterations) {
  alignas(64) uint16_t values[4][512];
  fill(values);
  load_tiles(values);
  for (int64_t round = 0; round < iterations; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  return first_sum();
}

float tile_i8(int64_t iterations) {
  alignas(64) int8_t values[4][1024];
  fill(values);
  load_tiles(values);
  for (int64_t round = 0; round < iterations; ++round) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  return first_sum();
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels kernels = [] {
    Kernels made = make_dot_kernels();
    made.bfloat16_tile = {2.0 * 4 * 16 * 16 * 32, tile_bf16};
    made.int8_tile = {2.0 * 4 * 16 * 16 * 64, tile_i8};
    return made;
  }();
  return kernels;
}

}  // namespace llmopt::machine_probe
