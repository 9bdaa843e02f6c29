// CUDA kernels of the gated norm's gradients, for the element types of this module.
#include <flashinfer/cuda/gated_norm_backward.cuh>

#include "gated_norm_backward_config.h"

namespace flashinfer {

int64_t gated_norm_backward_parts(int64_t num_rows, int64_t num_groups, int64_t group_size, const Launch& where) {
  return cuda::gated_norm_backward_parts(num_rows, num_groups, group_size, where);
}

void gated_rms_norm_backward(const GatedRmsNormBackwardParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::gated_rms_norm_backward<T>(params, where))
}

}  // namespace flashinfer
