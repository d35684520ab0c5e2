// The fused operations. Tensors come as addresses, checked by llmopt/ops/fused.py.
#include "llmopt/fused.h"

#include <nanobind/nanobind.h>

#include "bindings/common.h"

namespace llmopt {
namespace {

DType dtype_of(bool bfloat16) { return bfloat16 ? DType::kBFloat16 : DType::kFloat32; }

void call_rms_norm(bool bfloat16, uintptr_t x, int64_t row_stride, uintptr_t weight, uintptr_t out, int64_t num_rows,
                   int64_t size, float eps, bool adds_one, bool rounds_first, int num_threads) {
  const RmsNormArgs args{dtype_of(bfloat16),
                         pointer<const void>(x),
                         row_stride,
                         pointer<const void>(weight),
                         pointer<void>(out),
                         num_rows,
                         size,
                         eps,
                         adds_one,
                         rounds_first};
  run_unlocked_if_long(estimate_ns(args), [&] { rms_norm(args, num_threads); });
}

void call_gated_activation(bool bfloat16, int activation, uintptr_t gate, int64_t gate_stride, uintptr_t up,
                           int64_t up_stride, uintptr_t out, int64_t num_rows, int64_t size, int num_threads) {
  if (activation < 0 || activation > static_cast<int>(GateActivation::kGeluTanh)) {
    throw nb::value_error(("activation " + std::to_string(activation) + " is not known.").c_str());
  }
  const GatedArgs args{dtype_of(bfloat16),
                       static_cast<GateActivation>(activation),
                       pointer<const void>(gate),
                       gate_stride,
                       pointer<const void>(up),
                       up_stride,
                       pointer<void>(out),
                       num_rows,
                       size};
  run_unlocked_if_long(estimate_ns(args), [&] { gated_activation(args, num_threads); });
}

void call_rotate(bool bfloat16, uintptr_t x, int64_t batch_stride, int64_t token_stride, int64_t head_stride,
                 uintptr_t cos, uintptr_t sin, int64_t cos_batch_stride, int64_t cos_token_stride, uintptr_t out,
                 int64_t num_batches, int64_t num_tokens, int64_t num_heads, int64_t head_dim, int64_t rotary_dim,
                 bool interleaved, bool rounds_products, int num_threads) {
  const RotateArgs args{dtype_of(bfloat16),
                        pointer<const void>(x),
                        batch_stride,
                        token_stride,
                        head_stride,
                        pointer<const void>(cos),
                        pointer<const void>(sin),
                        cos_batch_stride,
                        cos_token_stride,
                        pointer<void>(out),
                        num_batches,
                        num_tokens,
                        num_heads,
                        head_dim,
                        rotary_dim,
                        interleaved,
                        rounds_products};
  run_unlocked_if_long(estimate_ns(args), [&] { rotate(args, num_threads); });
}

void call_few_rows_linear(bool bfloat16, uintptr_t x, int64_t x_stride, uintptr_t weight, int64_t weight_stride,
                          uintptr_t bias, uintptr_t out, int64_t num_rows, int64_t num_inputs, int64_t num_outputs,
                          int num_threads) {
  const FewRowsArgs args{dtype_of(bfloat16), pointer<const void>(x),
                         x_stride,           pointer<const void>(weight),
                         weight_stride,      pointer<const void>(bias),
                         pointer<void>(out), num_rows,
                         num_inputs,         num_outputs};
  run_unlocked_if_long(estimate_ns(args), [&] { few_rows_linear(args, num_threads); });
}

}  // namespace

void bind_fused(nb::module_& m) {
  m.def("rms_norm", &call_rms_norm);
  m.def("gated_activation", &call_gated_activation);
  m.def("rotate", &call_rotate);
  m.def("few_rows_linear", &call_few_rows_linear);
}

}  // namespace llmopt
