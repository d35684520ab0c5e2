// The vectors of core/simd.h under the names of the attention kernels.
#pragma once

#include "core/simd.h"

namespace llmopt::attention {
namespace {

using namespace simd;  // NOLINT: internal linkage, kernel sources only

}  // namespace
}  // namespace llmopt::attention
