// Configuration of the AMX tiles, the same for all kernels: eight tiles of 16 rows x 64 bytes. Only for kernel sources.
#pragma once

#if defined(__AMX_TILE__)
#include <immintrin.h>

#include <cstdint>

namespace llmopt {
namespace {

// Static, since GCC's intrinsic does not say that it reads all 64 bytes and the stores to a local variable would be
// dropped.
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
}

// Others on this thread configure tiles for themselves, and expect none set.
void leave_tiles() { _tile_release(); }

}  // namespace
}  // namespace llmopt
#endif
