// Between the driver and the kernels, which are compiled once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmopt/isa.h"

namespace llmopt::attention {

// Most rows of attend_rows, which reads keys and values in place. attend_tile packs them first, which pays when they
// are used often.
inline constexpr int kMaxRows = 8;

// Most rows of attend_row_tiles.
inline constexpr int kMaxTileRows = 16;
inline bool row_tiles_fit(int block_size, int head_dim, int head_dim_v) {
  return block_size % 16 == 0 && head_dim % 32 == 0 && head_dim_v % 32 == 0;
}

// Rows against a range of keys, for one key head. Row r = t * group + g is query head g of the group at token t.
// Pointers point at the first token, head and key head of the task.
struct Task {
  const void* query;
  int64_t query_token_stride, query_head_stride;  // elements
  int num_q, group;
  int first_position;           // key of the first token; negative: it sees no key
  const uint64_t* draft_masks;  // [num_q], null when no draft is in a tree: see StepInputs
  int first_draft;              // key of the request's first draft, with draft_masks
  const int32_t* block_table;
  int block_size;
  const std::byte* key;  // row [block 0, head, 0] of the cache
  const std::byte* value;
  int64_t key_block_bytes, value_block_bytes;
  int key_row_bytes, value_row_bytes;
  bool is_quantized;  // rows are int8 values and a scale, see llmopt/layer_cache.h
  void* unpacked;     // with it: room for the rows of kMaxChunkKeys keys and values as elements, 64-byte aligned
  int head_dim, head_dim_v;
  int key_begin, key_end;
  int sliding_window;  // 0: none
  float scale;
  float softcap;  // 0: off
  // Results, float32 in the scratch memory, row by row.
  float* accumulator;          // [rows, accumulator_stride], sum of exp2(score - max) * value
  int64_t accumulator_stride;  // at least head_dim_v rounded up to kColumnPadding
  float* row_max;              // [rows], in units of log2; -infinity: nothing seen
  float* row_sum;              // [rows]
  std::byte* workspace;        // workspace_bytes(...) bytes, 64-byte aligned
  const Task* next = nullptr;  // what this thread does next, if known: its keys and values are fetched
};

inline constexpr int kColumnPadding = 32;

// Most keys that a kernel looks at together.
inline constexpr int kMaxChunkKeys = 1024;

struct Kernels {
  // Up to this many rows attend_rows is the faster one, by measurement. At most kMaxRows.
  int rows_limit_f32 = kMaxRows;
  int rows_limit_bf16 = kMaxRows;
  // Fill accumulator, row_max and row_sum of a task. Rows are at most kMaxRows for attend_rows.
  void (*attend_rows_f32)(const Task&);
  void (*attend_rows_bf16)(const Task&);
  void (*attend_tile_f32)(const Task&);
  void (*attend_tile_bf16)(const Task&);
  // out[i] = row[i] * factor for i < n, rounded to the dtype. Rows are padded to kColumnPadding.
  void (*write_row_f32)(const float* row, int n, float factor, void* out);
  void (*write_row_bf16)(const float* row, int n, float factor, void* out);
  // n floats from n elements: the rotation of keys and queries, see llmopt/layer_cache.h. Floats may stay in place.
  void (*rotate_row_f32)(const void* from, int n, float* to);
  void (*rotate_row_bf16)(const void* from, int n, float* to);
  // A quantized row of n values from n elements.
  void (*quantize_row_f32)(const void* from, int n, int8_t* to);
  void (*quantize_row_bf16)(const void* from, int n, int8_t* to);
  // Bytes of workspace of attend_rows and attend_tile.
  size_t (*workspace_bytes)(int rows, int head_dim, int head_dim_v);
  // attend_rows for up to kMaxTileRows rows in tiles, where row_tiles_fit; may be null.
  void (*attend_row_tiles_bf16)(const Task&);
  size_t (*row_tile_workspace_bytes)(int head_dim);
  // attend_tile with keys in place, where row_tiles_fit; may be null.
  void (*attend_column_tiles_bf16)(const Task&);
  size_t (*column_tile_workspace_bytes)(int rows, int head_dim, int head_dim_v);
  // Around tasks with bfloat16 tiles, on each thread; may be null.
  void (*enter_tiles)();
  void (*leave_tiles)();
};

const Kernels& portable_kernels();
#if defined(LLMOPT_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();
const Kernels& amx_kernels();
#endif

const Kernels& kernels(Isa isa);

}  // namespace llmopt::attention
