// Operator of the causal convolution's gradients. The kernels are in causal_conv1d_backward_{cpu,cuda}.
#include "causal_conv1d/inputs.h"

#include <tuple>

namespace flashinfer::binding {
namespace {

// A gradient that does not exist has no elements.
std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_gradients(const OptionalTensor& grad_out,
                                                                   const OptionalTensor& grad_final, const Tensor& x,
                                                                   const Tensor& weight, const OptionalTensor& bias,
                                                                   const OptionalTensor& initial_states,
                                                                   const OptionalTensor& cu_seqlens, bool silu) {
  const Check check("causal_conv1d_backward");
  const CausalConv1dArguments args(check, x, weight, bias, initial_states, cu_seqlens, silu);
  const CausalConv1dInputs& in = args.inputs;
  CausalConv1dBackwardParams params{};
  params.in = in;
  const auto taken = [&](const Tensor& tensor, const char* name) {
    const View arg(tensor, name);
    check.same_dtype(arg, args.x);
    check.same_device(arg, args.x);
    check.contiguous(arg);
    check.aligned(arg);
    return arg;
  };
  if (grad_out) {
    const View arg = taken(*grad_out, "grad_out");
    check.same_shape(arg, args.x);
    params.grad_out = arg.data;
  }
  if (grad_final) {
    const View arg = taken(*grad_final, "grad_final");
    args.state_shape(arg);
    params.grad_final = arg.data;
  }
  const OnDevice where(args.x);
  const int64_t channels[] = {bias ? in.num_channels : 0};
  Tensor dx = empty_like(args.x, x), dweight = empty_like(args.weights.weight, weight);
  Tensor dbias = empty(channels, 1, weight), dinitial = args.new_states(initial_states.has_value(), x);
  params.part_tokens = causal_conv1d_part_tokens(in, where);
  params.num_parts = in.batch_size * ((in.num_tokens + params.part_tokens - 1) / params.part_tokens);
  const Tensor parts = empty_bytes(params.num_parts * (in.width + 1) * in.num_channels * kConvSumBytes, x);
  params.grad_x = View(dx, "grad_x").data, params.grad_weight = View(dweight, "grad_weight").data;
  params.grad_bias = bias ? View(dbias, "grad_bias").data : nullptr;
  params.grad_initial = initial_states ? View(dinitial, "grad_initial_states").data : nullptr;
  params.parts = View(parts, "parts").data;
  causal_conv1d_backward(params, where);
  return {std::move(dx), std::move(dweight), std::move(dbias), std::move(dinitial)};
}

FLASHINFER_LIBRARY(m) { m.impl("causal_conv1d_backward", box<causal_conv1d_gradients>); }

}  // namespace
}  // namespace flashinfer::binding
