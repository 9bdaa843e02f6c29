// CUDA kernels of the gated norm, for the element types of this module.
#include <flashinfer/cuda/gated_norm.cuh>

#include "gated_norm_config.h"

namespace flashinfer {

void gated_rms_norm(const GatedRmsNormParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::gated_rms_norm<T>(params, where))
}

}  // namespace flashinfer
