// y = x W^T for packed weights. Functions here run on one thread and do a share of the work: the caller, who has a team
// of threads, gives each a range of panels and keeps them in step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "llmopt/dtype.h"
#include "llmopt/packed_matrix.h"

namespace llmopt {

// How the kernels want their input rows.
enum class InputForm : uint8_t {
  kFloat32,
  kBFloat16,
  kInt16Token,  // 15 bits with one scale per row, x = scale * (128 * high + low), high and low int8: for kInt8
  kInt8Group,   // int8 with one scale per 32 values, and the sum of each 32: for the grouped formats, few rows
};

// The form that `matrix` is multiplied with for so many rows, with the instruction set in use.
InputForm input_form(const MatrixShape& shape, int64_t num_rows);

// Rows of x in one form. Made by InputBuffer; rows lie `row_bytes` apart, padded with zeros past num_inputs to a
// multiple of 128 values; up to the next multiple of 16 rows memory may be read, its results are thrown away. A row of
// kInt16Token is two planes, all of high (-127..127) and, row_bytes / 2 behind it, all of low (-64..63).
struct InputRows {
  InputForm form = InputForm::kFloat32;
  int64_t num_rows = 0;
  int64_t num_inputs = 0;
  const std::byte* data = nullptr;  // 64-byte aligned
  int64_t row_bytes = 0;
  const float* scales = nullptr;  // kInt16Token: [num_rows]; kInt8Group: [num_rows, scale_stride]
  const float* sums = nullptr;    // kInt8Group: scale * sum of the group's int8 values, [num_rows, scale_stride]
  // Minus the sum of int8 values. kInt16Token: of the planes of a row, [num_rows, 2]; kInt8Group: of the group,
  // [num_rows, scale_stride]
  const int32_t* negative_sums = nullptr;
  const int32_t* negative_half_sums = nullptr;  // kInt8Group: the same of each 16, [num_rows, 2 * scale_stride]
  int64_t scale_stride = 0;
};

struct AlignedFree {
  void operator()(std::byte* memory) const;
};

// Memory for rows in any form, kept between steps. Rows may be filled by several threads, each its own rows.
class InputBuffer {
 public:
  // Make room; what was in it is lost. One thread.
  void resize(InputForm form, int64_t num_rows, int64_t num_inputs);
  // Convert row `index`. values: [num_inputs] float32
  void fill_row(int64_t index, const float* values);
  const InputRows& rows() const { return rows_; }

 private:
  InputRows rows_;
  std::unique_ptr<std::byte, AlignedFree> memory_;
  size_t capacity_ = 0;
};

enum class Activation : uint8_t { kNone, kSilu, kGelu, kGeluTanh, kRelu, kReluSquared };

// What happens to the products. In this order: + bias, activation, * scale, store or add.
struct LinearOutput {
  enum class Kind : uint8_t {
    kStore,  // out = y
    kAdd,    // out += y
    kGated,  // panels alternate: 16 gate columns, the 16 up columns that belong to them (N is a multiple of 32);
             // out = act(gate) * up * scale, N/2 wide
  };
  Kind kind = Kind::kStore;
  DType dtype = DType::kFloat32;  // of out; kAdd wants kFloat32
  void* out = nullptr;            // [num_rows, N or N/2]
  int64_t row_stride = 0;         // elements
  const float* bias = nullptr;    // [N] in the order of the packed columns, or null
  Activation activation = Activation::kNone;
  float scale = 1.0f;
};

// Memory of one thread for linear(), kept between calls.
class LinearScratch {
 public:
  // 64-byte aligned. There are two memories; asking for more of one leaves the other in place.
  std::byte* at_least(size_t bytes, int which = 0);

 private:
  std::unique_ptr<std::byte, AlignedFree> memory_[2];
  size_t size_[2] = {};
};

// Compute the panels [panel_begin, panel_end) of all rows. For kGated both bounds are even. What a row gets does not
// depend on the other rows, except that their number chooses the kernel.
// Padded columns are not written. The input has the form that input_form names.
void linear(const PackedMatrix& matrix, const InputRows& input, const LinearOutput& output, int64_t panel_begin,
            int64_t panel_end, LinearScratch& scratch);

// Fetch the first bytes of a panel to the cache: what a thread does before it waits for others.
void prefetch_panels(const PackedMatrix& matrix, int64_t panel_begin, int64_t panel_end);

// Tiles are configured per thread: one scope around all linear() and attention calls of a thread's share of a step.
// Does nothing where the instruction set in use has no tiles.
class TileScope {
 public:
  TileScope();
  ~TileScope();
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  bool entered_;
};

// Thresholds that depend on the machine. Set before the first step (autotune does); read by linear().
struct LinearTuning {
  int tile_rows_bf16 = 5;     // from so many rows on: AMX tiles instead of dot products
  int tile_rows_int8 = 1;     // two planes of eight rows are one tile: half the instructions of dot products
  int tile_rows_group = 14;   // up to here the scales of the groups cost more than the products
  int unpack_rows = 72;       // grouped formats: unpack to bfloat16 and use its tiles
  int prefetch_bytes = 4096;  // how far ahead of the reading a panel is fetched
};
LinearTuning& linear_tuning();

}  // namespace llmopt
