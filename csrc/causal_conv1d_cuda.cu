// CUDA kernels of the causal convolution, for the element types of this module.
#include <flashinfer/cuda/causal_conv1d.cuh>

#include "causal_conv1d_config.h"

namespace flashinfer {

void causal_conv1d(const CausalConv1dParams& params, const Launch& where) {
  DISPATCH_dtype(params.in.dtype, T, cuda::causal_conv1d<T>(params, where))
}

void causal_conv1d_update(const CausalConv1dUpdateParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::causal_conv1d_update<T>(params, where))
}

}  // namespace flashinfer
