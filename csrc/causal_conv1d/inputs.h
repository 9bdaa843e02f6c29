// Checks that the operators of the causal convolution share.
#pragma once

#include "binding/binding.h"

#include <flashinfer/common/causal_conv1d.h>

#include <optional>
#include <string>

namespace flashinfer::binding {

using OptionalTensor = std::optional<Tensor>;

// Weight [channels, W] and bias [channels] of x's type or float32, contiguous.
struct ConvWeights {
  View weight;
  const void* bias_data = nullptr;
  int width;
  bool is_float;

  ConvWeights(const Check& check, const View& x, int64_t channels, const Tensor& weight_, const OptionalTensor& bias)
      : weight(weight_, "weight") {
    check.shape(weight, {channels, -1});
    const int64_t got = weight.size(1);
    if (got < kMinConvWidth || got > kMaxConvWidth)
      check.fail(weight, "got a width of " + std::to_string(got) + ", wanted " + std::to_string(kMinConvWidth) +
                             " to " + std::to_string(kMaxConvWidth));
    check.dtype(weight, {x.dtype, DType::kFloat32});
    check.same_device(weight, x);
    check.contiguous(weight);
    check.aligned(weight);
    width = static_cast<int>(got), is_float = weight.dtype == DType::kFloat32 && x.dtype != DType::kFloat32;
    if (!bias) return;
    const View arg(*bias, "bias");
    check.shape(arg, {channels});
    check.same_dtype(arg, weight);
    check.same_device(arg, x);
    check.contiguous(arg);
    check.aligned(arg);
    bias_data = arg.data;
  }
};

inline Indices conv_indices(const Check& check, const View& arg, const View& like) {
  check.dtype(arg, {DType::kInt32, DType::kInt64});
  check.same_device(arg, like);
  check.contiguous(arg);
  check.aligned(arg);
  return {arg.data, arg.dtype == DType::kInt64};
}

// x with contiguous channels: itself, or a copy.
struct ConvInput {
  std::optional<Tensor> copy;
  View x;

  ConvInput(const Check& check, const Tensor& tensor, const char* name, int64_t min_rank)
      : copy(with_channels_last(check, tensor, name, min_rank)), x(copy ? *copy : tensor, name) {}

 private:
  static std::optional<Tensor> with_channels_last(const Check& check, const Tensor& tensor, const char* name,
                                                  int64_t rank) {
    const View arg(tensor, name);
    check.rank(arg, rank, rank);
    check.trainable(arg);
    check.aligned(arg);
    if (arg.numel == 0 || arg.size(-1) == 1 || arg.stride(-1) == 1) return std::nullopt;
    const OnDevice where(arg);
    Tensor result = empty_like(arg, tensor);
    require(aoti_torch_copy_(result.get(), tensor.get(), false), "a copy with contiguous channels");
    return result;
  }
};

struct CausalConv1dArguments {
  const Check& check;
  ConvInput input;
  const View& x;
  ConvWeights weights;
  CausalConv1dInputs inputs{};

  CausalConv1dArguments(const Check& check_, const Tensor& x_, const Tensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& initial_states, const OptionalTensor& cu_seqlens, bool silu)
      : check(check_), input(check_, x_, "x", 3), x(input.x), weights(check_, x, x.size(2), weight, bias) {
    inputs.x = x.data;
    inputs.weight = weights.weight.data;
    inputs.bias = weights.bias_data;
    inputs.x_batch_stride = x.stride(0), inputs.x_token_stride = x.stride(1);
    inputs.batch_size = x.size(0);
    inputs.num_tokens = x.size(1);
    inputs.num_channels = x.size(2);
    inputs.width = weights.width, inputs.weight_is_float = weights.is_float;
    inputs.silu = silu, inputs.dtype = x.dtype;
    inputs.num_sequences = inputs.batch_size;
    if (cu_seqlens) take(View(*cu_seqlens, "cu_seqlens"));
    if (!initial_states) return;
    const View arg(*initial_states, "initial_states");
    state_shape(arg);
    inputs.initial = arg.data, inputs.initial_strides = {arg.stride(0), arg.stride(1), arg.stride(2)};
  }

  void state_shape(const View& arg) const {
    check.shape(arg, {inputs.num_sequences, inputs.num_channels, inputs.width - 1});
    check.same_dtype(arg, x);
    check.same_device(arg, x);
    check.aligned(arg);
  }

  Tensor new_states(bool wanted, const Tensor& like) const {
    const int64_t sizes[] = {wanted ? inputs.num_sequences : 0, inputs.num_channels, inputs.width - 1};
    return empty(sizes, 3, like);
  }

 private:
  void take(const View& cu_seqlens) {
    check.rank(cu_seqlens, 1, 1);
    inputs.cu_seqlens = conv_indices(check, cu_seqlens, x);
    if (inputs.batch_size != 1)
      check.fail(x, "got a batch of " + std::to_string(inputs.batch_size) + ", wanted 1 with cu_seqlens");
    const int64_t num = inputs.num_sequences = cu_seqlens.size(0) - 1;
    if (num < 0 || (num == 0 && inputs.num_tokens > 0))
      check.fail(cu_seqlens, "got " + std::to_string(num + 1) + " elements, wanted at least two");
    if (kOnCuda) return;  // kernels clamp the values instead
    for (int64_t n = 0; n <= num; ++n) {
      const int64_t got = inputs.cu_seqlens[n], least = n ? inputs.cu_seqlens[n - 1] : 0;
      if (got < least || (n == 0 && got != 0) || (n == num && got != inputs.num_tokens))
        check.fail(cu_seqlens, "got " + std::to_string(got) + " at " + std::to_string(n) +
                                   ", wanted offsets from 0 to " + std::to_string(inputs.num_tokens) +
                                   " that do not decrease");
    }
  }
};

}  // namespace flashinfer::binding
