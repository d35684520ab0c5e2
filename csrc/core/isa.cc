#include "llmopt/isa.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#if defined(LLMOPT_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace llmopt {
namespace {

constexpr Isa kNarrowToWide[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx};

#if defined(LLMOPT_X86)
// Linux hands out the tile registers on request, for the whole process.
bool request_amx() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXfeatureTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
}

bool machine_has(Isa isa) {
  // The builtin also looks at XCR0, that is, whether the operating system saves the registers.
  __builtin_cpu_init();
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return machine_has(Isa::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::kAvx512Bf16:
      return machine_has(Isa::kAvx512) && __builtin_cpu_supports("avx512vnni") &&
             __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);
    case Isa::kAmx: {
      constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
      return machine_has(Isa::kAvx512Bf16) && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kAmxBf16) &&
             (edx & kAmxTile) && (edx & kAmxInt8) && request_amx();
    }
  }
  return false;
}
#else
bool machine_has(Isa isa) { return isa == Isa::kPortable; }
#endif

std::string list(const std::vector<Isa>& isas) {
  std::string text;
  for (Isa isa : isas) text += (text.empty() ? "" : ", ") + std::string(name(isa));
  return text;
}

}  // namespace

const char* name(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
    case Isa::kAmx:
      return "amx";
  }
  return "unknown";
}

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> isas = [] {
    std::vector<Isa> found;
    for (Isa isa : kNarrowToWide) {
      if (machine_has(isa)) found.insert(found.begin(), isa);
    }
    return found;
  }();
  return isas;
}

Isa select_isa(std::string_view requested) {
  const std::vector<Isa>& available = available_isas();
  if (requested.empty()) return available.front();
  for (Isa isa : kNarrowToWide) {
    if (requested != name(isa)) continue;
    if (std::find(available.begin(), available.end(), isa) != available.end()) return isa;
    throw std::runtime_error("LLMOPT_ISA=" + std::string(requested) + " but this machine has only " + list(available) +
                             "; unset LLMOPT_ISA or choose one of these.");
  }
  throw std::runtime_error("LLMOPT_ISA=" + std::string(requested) + " is not known; choose one of " + list(available) +
                           ".");
}

Isa selected_isa() {
  static const Isa isa = [] {
    const char* requested = std::getenv("LLMOPT_ISA");
    return select_isa(requested ? requested : "");
  }();
  return isa;
}

}  // namespace llmopt
