// Between linear() and the kernels, which are compiled once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmopt/isa.h"
#include "llmopt/linear.h"

namespace llmopt::matmul {

// All rows against the panels [panel_begin, panel_end) of one matrix, on one thread.
struct Task {
  const MatrixShape& shape;
  const std::byte* panels;  // panel `first_panel` of the matrix
  int64_t panel_bytes;
  int64_t depth;  // K as padded in the panels
  const InputRows& input;
  const LinearOutput& output;
  int64_t panel_begin, panel_end;
  int64_t prefetch_bytes;  // how far ahead of the reading; less than panel_bytes
  LinearScratch& scratch;
  int64_t first_panel = 0;

  const std::byte* panel(int64_t index) const { return panels + (index - first_panel) * panel_bytes; }
  const std::byte* input_row(int64_t index) const { return input.data + index * input.row_bytes; }
};

using Multiply = void (*)(const Task&);

// A null pointer: this instruction set has no such kernel, another one serves.
struct Kernels {
  // Form of the input rows of bfloat16 weights (and of grouped weights that are unpacked for many rows).
  InputForm bf16_form = InputForm::kFloat32;

  // Any number of rows. Where a *_tiles kernel exists, linear() prefers it from linear_tuning()'s number of rows on.
  Multiply float32 = nullptr;
  Multiply bfloat16 = nullptr;
  Multiply bfloat16_tiles = nullptr;
  Multiply int8 = nullptr;  // input kInt16Token
  Multiply int8_tiles = nullptr;
  Multiply int8_group = nullptr;  // kInt8Group weights, input kInt8Group
  Multiply int4_group = nullptr;
  Multiply group_tiles = nullptr;     // both grouped formats, input kInt8Group
  Multiply group_unpacked = nullptr;  // both unpacked to bfloat16 first, input bf16_form

  // One input row: n values, then zeros up to `padded` (a multiple of 128) values.
  void (*fill_bfloat16)(const float* values, int64_t n, int64_t padded, uint16_t* row) = nullptr;
  void (*fill_int16_token)(const float* values, int64_t n, int64_t padded, int8_t* high, int8_t* low, float* scale,
                           int32_t* negative_sums) = nullptr;
  void (*fill_int8_group)(const float* values, int64_t n, int64_t padded, int8_t* row, float* scales, float* sums,
                          int32_t* negative_sums, int32_t* negative_half_sums) = nullptr;

  // Around tile kernels, on each thread; may be null.
  void (*enter_tiles)() = nullptr;
  void (*leave_tiles)() = nullptr;
};

const Kernels& portable_kernels();
#if defined(LLMOPT_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();
const Kernels& amx_kernels();
#endif

const Kernels& kernels(Isa isa);

}  // namespace llmopt::matmul
