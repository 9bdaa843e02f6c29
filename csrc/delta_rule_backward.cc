// Operator of the delta rule's gradients. The kernels are in delta_rule_backward_{cpu,cuda}.
#include "delta_rule/inputs.h"

#include <tuple>

namespace flashinfer::binding {
namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// A gradient that does not exist, or that the caller does not need, has no elements.
Gradients delta_rule_gradients(const OptionalTensor& grad_o, const OptionalTensor& grad_state, const Tensor& q,
                               const Tensor& k, const Tensor& v, const OptionalTensor& g, const OptionalTensor& gk,
                               const OptionalTensor& beta, const OptionalTensor& initial_state,
                               const OptionalTensor& cu_seqlens, double scale, const OptionalTensor& scale_tensor,
                               bool l2norm, bool v_first, bool chunked) {
  const Check check("delta_rule_backward");
  const DeltaRuleArguments args(check, q, k, v, g, gk, beta, cu_seqlens, scale, scale_tensor, l2norm, v_first, chunked);
  const DeltaRuleInputs& in = args.inputs;
  DeltaRuleBackwardParams params{};
  params.in = in;
  if (grad_o) {
    const View arg(*grad_o, "grad_o");
    check.same_shape(arg, args.v);
    check.same_dtype(arg, args.v);
    check.same_device(arg, args.v);
    check.contiguous(arg);
    check.aligned(arg);
    params.grad_o = arg.data;
  }
  params.grad_state = args.state(grad_state, "grad_state");
  params.initial_state = args.state(initial_state, "initial_state");
  const OnDevice where(args.q);
  const auto like = [&](const View& arg, const Tensor& tensor) { return empty(arg.sizes, arg.ndim, tensor); };
  const auto optional = [&](const OptionalTensor& tensor) {
    if (tensor) return like(View(*tensor, "gate"), *tensor);
    const int64_t none = 0;
    return empty(&none, 1, q, state_type(args.q.dtype));
  };
  Tensor dq = like(args.q, q);
  Tensor dk = like(args.k, k);
  Tensor dv = like(args.v, v);
  Tensor dg = optional(g);
  Tensor dgk = optional(gk);
  Tensor dbeta = optional(beta);
  Tensor dh0 = args.new_states(in.num_sequences, q);
  params.grad_q = View(dq, "grad_q").data, params.grad_k = View(dk, "grad_k").data;
  params.grad_v = View(dv, "grad_v").data;
  params.grad_g = g ? View(dg, "grad_g").data : nullptr;
  params.grad_gk = gk ? View(dgk, "grad_gk").data : nullptr;
  params.grad_beta = beta ? View(dbeta, "grad_beta").data : nullptr;
  params.grad_initial_state = View(dh0, "grad_initial_state").data;
  const Tensor workspace = empty_bytes(delta_rule_workspace(params, where), q);
  params.workspace = View(workspace, "workspace").data;
  delta_rule_backward(params, where);
  return {std::move(dq), std::move(dk), std::move(dv), std::move(dg), std::move(dgk), std::move(dbeta), std::move(dh0)};
}

FLASHINFER_LIBRARY(m) { m.impl("delta_rule_backward", box<delta_rule_gradients>); }

}  // namespace
}  // namespace flashinfer::binding
