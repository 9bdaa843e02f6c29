// Gradients of norms on CUDA, for the element types of this module.
#include <flashinfer/cuda/norm_backward.cuh>

#include "norm_backward_config.h"

namespace flashinfer {

int64_t norm_backward_parts(int64_t num_rows, int64_t hidden_size, const Launch& where) {
  return cuda::norm_backward_parts(num_rows, hidden_size, where);
}

void rms_norm_backward(const RmsNormBackwardParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::rms_norm_backward<T>(params, where))
}

void layer_norm_backward(const LayerNormBackwardParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T,
                 params.affine_is_float32 ? cuda::layer_norm_backward<T, float>(params, where)
                                          : cuda::layer_norm_backward<T, T>(params, where))
}

}  // namespace flashinfer
