// CPU kernels of the causal convolution's gradients, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/causal_conv1d_backward.h>

#include "causal_conv1d_backward_config.h"

namespace flashinfer {

int64_t causal_conv1d_part_tokens(const CausalConv1dInputs& inputs, const Launch&) {
  return cpu::causal_conv1d_part_tokens(inputs);
}

void causal_conv1d_backward(const CausalConv1dBackwardParams& params, const Launch&) {
  if (params.in.dtype == DType::kFloat64) return cpu::causal_conv1d_backward<double>(params);
  DISPATCH_dtype(params.in.dtype, T, cpu::causal_conv1d_backward<T>(params))
}

}  // namespace flashinfer
