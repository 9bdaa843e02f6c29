// Operators of the causal convolution. The kernels are in causal_conv1d_cpu.cc and causal_conv1d_cuda.cu.
#include "causal_conv1d/inputs.h"

#include <tuple>

namespace flashinfer::binding {
namespace {

std::tuple<Tensor, Tensor> causal_conv1d_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                                 const OptionalTensor& initial_states, const OptionalTensor& cu_seqlens,
                                                 bool final_states, bool silu) {
  const Check check("causal_conv1d_fn");
  const CausalConv1dArguments args(check, x, weight, bias, initial_states, cu_seqlens, silu);
  const OnDevice where(args.x);
  Tensor out = empty_like(args.x, x), states = args.new_states(final_states, x);
  const CausalConv1dParams params{.in = args.inputs,
                                  .out = View(out, "out").data,
                                  .final_states = final_states ? View(states, "final_states").data : nullptr};
  causal_conv1d(params, where);
  return {std::move(out), std::move(states)};
}

// Update each row by a few tokens, on states in slots that are updated in place.
Tensor causal_conv1d_update_slots(const Tensor& x_, const Tensor& conv_state, const Tensor& weight,
                                  const OptionalTensor& bias, const OptionalTensor& cache_seqlens,
                                  const OptionalTensor& conv_state_indices, int64_t pad_slot_id, bool silu) {
  const Check check("causal_conv1d_update");
  const View x(x_, "x"), state(conv_state, "conv_state");
  check.rank(x, 3, 3);
  check.trainable(x);
  check.aligned(x);
  const int64_t batch = x.size(0), channels = x.size(1);
  const ConvWeights weights(check, x, channels, weight, bias);
  check.shape(state, {conv_state_indices ? -1 : batch, channels, -1});
  check.same_dtype(state, x);
  check.same_device(state, x);
  check.writable(state);
  check.no_overlap(state, x, false);
  if (state.size(2) < weights.width - 1)
    check.fail(state, "got " + std::to_string(state.size(2)) + " times, wanted at least " +
                          std::to_string(weights.width - 1) + " with a width of " + std::to_string(weights.width));
  const auto per_row = [&](const OptionalTensor& tensor, const char* name) -> Indices {
    if (!tensor) return {};
    const View arg(*tensor, name);
    check.shape(arg, {batch});
    check.no_overlap(state, arg, false);
    return conv_indices(check, arg, x);
  };
  CausalConv1dUpdateParams params{};
  params.cache_seqlens = per_row(cache_seqlens, "cache_seqlens");
  params.slots = per_row(conv_state_indices, "conv_state_indices");
  if (cache_seqlens && x.size(2) > state.size(2))
    check.fail(x, "got " + std::to_string(x.size(2)) + " tokens, wanted at most the " + std::to_string(state.size(2)) +
                      " of conv_state with cache_seqlens");
  const OnDevice where(x);
  Tensor out = empty_like(x, x_);
  params.x = x.data, params.states = state.data;
  params.weight = weights.weight.data, params.bias = weights.bias_data;
  params.out = View(out, "out").data;
  params.x_strides = {x.stride(0), x.stride(1), x.stride(2)};
  params.state_strides = {state.stride(0), state.stride(1), state.stride(2)};
  params.batch_size = batch;
  params.num_channels = channels;
  params.num_tokens = x.size(2);
  params.num_slots = state.size(0), params.state_length = state.size(2);
  params.pad_slot = pad_slot_id, params.width = weights.width;
  params.silu = silu;
  params.weight_is_float = weights.is_float;
  params.dtype = x.dtype;
  causal_conv1d_update(params, where);
  return out;
}

FLASHINFER_LIBRARY(m) {
  m.impl("causal_conv1d", box<causal_conv1d_forward>);
  m.impl("causal_conv1d_autograd", box<causal_conv1d_forward>);
  m.impl("causal_conv1d_update", box<causal_conv1d_update_slots>);
}

}  // namespace
}  // namespace flashinfer::binding
