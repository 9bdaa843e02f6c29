// Operator of the gated norm's gradients. The kernels are in gated_norm_backward_cpu.cc and ..._cuda.cu.
#include "gated_norm/inputs.h"

#include <flashinfer/common/gated_norm_backward.h>

#include <tuple>

namespace flashinfer::binding {
namespace {

std::tuple<Tensor, Tensor, Tensor> gated_rmsnorm_backward(const Tensor& grad_, const Tensor& input, const Tensor& gate,
                                                          const Tensor& weight, double eps,
                                                          const std::optional<Tensor>& eps_tensor, int64_t group_size,
                                                          bool sigmoid, bool norm_before_gate) {
  const Check check("gated_rmsnorm_backward");
  const GatedNormArguments args(check, input, gate, weight, group_size);
  const View grad(grad_, "grad");
  check.same_shape(grad, args.x);
  check.same_dtype(grad, args.x);
  check.same_device(grad, args.x);
  check.last_contiguous(grad);
  check.aligned(grad);
  const OnDevice where(args.x);
  Tensor dx = empty_like(args.x, input), dz = empty_like(args.z, gate), dw = empty_like(args.w, weight);
  const int64_t parts = gated_norm_backward_parts(args.num_rows, args.num_groups, args.group_size, where);
  const Tensor sums = empty_bytes(parts * args.w.numel * kGatedSumBytes, input);
  const GatedRmsNormBackwardParams params{.grad = grad.data,
                                          .input = args.x.data,
                                          .gate = args.z.data,
                                          .weight = args.w.data,
                                          .grad_input = View(dx, "grad_input").data,
                                          .grad_gate = View(dz, "grad_gate").data,
                                          .grad_weight = View(dw, "grad_weight").data,
                                          .parts = View(sums, "sums").data,
                                          .grad_rows = check.rows(grad),
                                          .input_rows = check.rows(args.x),
                                          .gate_rows = check.rows(args.z),
                                          .num_rows = args.num_rows,
                                          .num_parts = parts,
                                          .num_groups = args.num_groups,
                                          .group_size = args.group_size,
                                          .eps = check.scalar(eps, eps_tensor, "eps_tensor", args.x),
                                          .sigmoid = sigmoid,
                                          .norm_before_gate = norm_before_gate,
                                          .dtype = args.x.dtype};
  gated_rms_norm_backward(params, where);
  return {std::move(dx), std::move(dz), std::move(dw)};
}

FLASHINFER_LIBRARY(m) { m.impl("gated_rmsnorm_backward", box<gated_rmsnorm_backward>); }

}  // namespace
}  // namespace flashinfer::binding
