// Gradient of one activation function on CUDA, for the element types of this module.
#include <flashinfer/cuda/activation_backward.cuh>

#include "activation_backward_config.h"

namespace flashinfer {

void act_and_mul_backward(const ActAndMulBackwardParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::act_and_mul_backward<T, ACTIVATION>(params, where))
}

}  // namespace flashinfer
