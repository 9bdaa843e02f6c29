// Norms on CUDA, for the element types of this module.
#include <flashinfer/cuda/norm.cuh>

#include "norm_config.h"

namespace flashinfer {

void rms_norm(const RmsNormParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::rms_norm<T>(params, where))
}

void layer_norm(const LayerNormParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::layer_norm<T>(params, where))
}

}  // namespace flashinfer
