// Kernels of the integer formats: what make_kernels() puts into the table for them.
#pragma once

#include "core/linear/kernels.h"
#include "core/simd.h"

namespace llmopt::matmul {
namespace {

inline void add_int_kernels(Kernels&) {}

}  // namespace
}  // namespace llmopt::matmul
