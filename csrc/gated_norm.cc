// Operator of the gated norm. The kernels are in gated_norm_cpu.cc and gated_norm_cuda.cu.
#include "binding/binding.h"
#include "gated_norm/inputs.h"

namespace flashinfer::binding {
namespace {

Tensor gated_rmsnorm_autograd(const Tensor& input, const Tensor& gate, const Tensor& weight, double eps,
                              const std::optional<Tensor>& eps_tensor, int64_t group_size, bool sigmoid,
                              bool norm_before_gate) {
  const Check check("gated_rmsnorm");
  const GatedNormArguments args(check, input, gate, weight, group_size);
  Tensor out = empty_like(args.x, input);
  const GatedRmsNormParams params{.input = args.x.data,
                                  .gate = args.z.data,
                                  .weight = args.w.data,
                                  .output = View(out, "out").data,
                                  .input_rows = check.rows(args.x),
                                  .gate_rows = check.rows(args.z),
                                  .output_rows = check.rows(View(out, "out")),
                                  .num_rows = args.num_rows,
                                  .num_groups = args.num_groups,
                                  .group_size = args.group_size,
                                  .eps = check.scalar(eps, eps_tensor, "eps_tensor", args.x),
                                  .sigmoid = sigmoid,
                                  .norm_before_gate = norm_before_gate,
                                  .dtype = args.x.dtype};
  if (args.num_rows > 0) gated_rms_norm(params, OnDevice(args.x));
  return out;
}

Tensor gated_rmsnorm(const Tensor& input, const Tensor& gate, const Tensor& weight, double eps, int64_t group_size,
                     bool sigmoid, bool norm_before_gate) {
  return gated_rmsnorm_autograd(input, gate, weight, eps, std::nullopt, group_size, sigmoid, norm_before_gate);
}

FLASHINFER_LIBRARY(m) {
  m.impl("gated_rmsnorm", box<gated_rmsnorm>);
  m.impl("gated_rmsnorm_autograd", box<gated_rmsnorm_autograd>);
}

}  // namespace
}  // namespace flashinfer::binding
