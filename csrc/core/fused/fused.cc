#include "llmopt/fused.h"

#include <algorithm>

#include "core/fused/kernels.h"
#include "llmopt/parallel.h"

namespace llmopt {
namespace fused {

const Kernels& kernels(Isa isa) {
  switch (isa) {
#if defined(LLMOPT_X86)
    case Isa::kAmx:
    case Isa::kAvx512Bf16:
      return avx512_bf16_kernels();
    case Isa::kAvx512:
      return avx512_kernels();
    case Isa::kAvx2:
      return avx2_kernels();
#endif
    default:
      return portable_kernels();
  }
}

namespace {

const Kernels& selected() {
  static const Kernels& chosen = kernels(selected_isa());
  return chosen;
}

// A team costs a few microseconds to call together.
constexpr double kMinTeamNs = 8000;
// Shares of a row are multiples of this, so that threads do not write to the same cache line.
constexpr int64_t kOutputGroup = 64;

template <class Run>
void share(double estimated_ns, int64_t num_rows, int64_t group, int num_threads, const Run& run) {
  const int64_t num_groups = (num_rows + group - 1) / group;
  if (num_threads < 2 || num_groups < 2 || estimated_ns < kMinTeamNs) {
    run(0, num_rows);
    return;
  }
  parallel_team(num_threads, [&](int thread, int team) {
    const int64_t begin = num_groups * thread / team * group;
    const int64_t end = std::min(num_rows, num_groups * (thread + 1) / team * group);
    if (begin < end) run(begin, end);
  });
}

int element_bytes(DType dtype) { return dtype == DType::kBFloat16 ? 2 : 4; }

}  // namespace
}  // namespace fused

double estimate_ns(const RmsNormArgs& args) { return 0.12 * static_cast<double>(args.num_rows * args.size); }
double estimate_ns(const GatedArgs& args) { return 0.4 * static_cast<double>(args.num_rows * args.size); }
double estimate_ns(const RotateArgs& args) {
  return (args.interleaved ? 2.0 : 0.2) *
         static_cast<double>(args.num_batches * args.num_tokens * args.num_heads * args.head_dim);
}
double estimate_ns(const FewRowsArgs& args) {
  const double bytes = static_cast<double>(args.num_outputs * args.num_inputs) * fused::element_bytes(args.dtype);
  return 0.04 * bytes * static_cast<double>(std::max<int64_t>(1, args.num_rows / 4));
}

void rms_norm(const RmsNormArgs& args, int num_threads) {
  fused::share(estimate_ns(args), args.num_rows, 1, num_threads,
               [&](int64_t begin, int64_t end) { fused::selected().rms_norm(args, begin, end); });
}

void gated_activation(const GatedArgs& args, int num_threads) {
  fused::share(estimate_ns(args), args.num_rows, 1, num_threads,
               [&](int64_t begin, int64_t end) { fused::selected().gated_activation(args, begin, end); });
}

void rotate(const RotateArgs& args, int num_threads) {
  fused::share(estimate_ns(args), args.num_batches * args.num_tokens, 1, num_threads,
               [&](int64_t begin, int64_t end) { fused::selected().rotate(args, begin, end); });
}

void few_rows_linear(const FewRowsArgs& args, int num_threads) {
  fused::share(estimate_ns(args), args.num_outputs, fused::kOutputGroup, num_threads,
               [&](int64_t begin, int64_t end) { fused::selected().few_rows_linear(args, begin, end); });
}

}  // namespace llmopt
