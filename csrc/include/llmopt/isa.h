// The instruction set the kernels run with, chosen once per process.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace llmopt {

// From narrow to wide; each level may use what the levels before it need.
//   kPortable    what the compiler targets by default
//   kAvx2        AVX2, FMA, F16C
//   kAvx512      AVX-512 F, BW, DQ, VL
//   kAvx512Bf16  and AVX512_BF16, AVX512_VNNI: dot products of bfloat16 and of int8
//   kAmx         and AMX-BF16, AMX-INT8: tiles of both, with the permission of the operating system
enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmx };

const char* name(Isa isa);

// What this machine and this build can run, widest first.
const std::vector<Isa>& available_isas();

// The level named by LLMOPT_ISA, or the widest one available. Decided by the first call.
// Throws std::runtime_error when the name is unknown or the level is not available.
Isa selected_isa();

// The same choice for a given name; an empty name asks for the widest level.
Isa select_isa(std::string_view requested);

}  // namespace llmopt
