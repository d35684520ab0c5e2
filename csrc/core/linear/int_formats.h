// Kernels of the integer formats: what make_kernels() puts into the table for them.
#pragma once

#include "core/linear/int8.h"
#include "core/linear/int_groups.h"
#include "core/linear/int_tiles.h"
#include "core/linear/int_unpack.h"
#include "core/linear/quantize.h"

namespace llmopt::matmul {
namespace {

void add_int_kernels(Kernels& kernels) {
  kernels.int8 = multiply_int_rows<Int8Columns>;
  kernels.int8_group = multiply_int8_group;
  kernels.int4_group = multiply_int4_group;
  kernels.fill_int16_token = fill_int16_token;
  kernels.fill_int8_group = fill_int8_group;
#if defined(__AMX_INT8__)
  kernels.group_tiles = multiply_group_tiles;
  kernels.group_unpacked = multiply_unpacked;
#endif
}

}  // namespace
}  // namespace llmopt::matmul
