#include "core/machine_probe/dots_avx512_bf16.h"

namespace llmopt::machine_probe {
namespace {

// Eight tiles of 16 rows x 64 bytes. Static, since GCC's intrinsic does not say that it reads all 64 bytes and the
// stores to a local variable would be dropped.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);
const TileConfig tile_config;

void enter_tiles() {
  asm volatile("" : : "r"(&tile_config) : "memory");
  _tile_loadconfig(&tile_config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
}

float leave_tiles() {
  alignas(64) float rows[16 * 16];
  _tile_stored(0, rows, 64);
  asm volatile("" : : "r"(rows) : "memory");
  _tile_release();
  return rows[0];
}

// Four accumulators, 0 to 3, of two tiles times two, as a matrix product uses them. Zeros take the same time as others.
float tile_bf16(int64_t iterations) {
  enter_tiles();
  for (int64_t round = 0; round < iterations; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  return leave_tiles();
}

float tile_i8(int64_t iterations) {
  enter_tiles();
  for (int64_t round = 0; round < iterations; ++round) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  return leave_tiles();
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
