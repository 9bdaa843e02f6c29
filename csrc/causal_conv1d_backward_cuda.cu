// CUDA kernels of the causal convolution's gradients, for the element types of this module.
#include <flashinfer/cuda/causal_conv1d_backward.cuh>

#include "causal_conv1d_backward_config.h"

namespace flashinfer {

int64_t causal_conv1d_part_tokens(const CausalConv1dInputs& inputs, const Launch& where) {
  return cuda::causal_conv1d_part_tokens(inputs, where);
}

void causal_conv1d_backward(const CausalConv1dBackwardParams& params, const Launch& where) {
  DISPATCH_dtype(params.in.dtype, T, cuda::causal_conv1d_backward<T>(params, where))
}

}  // namespace flashinfer
