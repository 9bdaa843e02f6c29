// One activation function on CUDA, for the element types of this module.
#include <flashinfer/cuda/activation.cuh>

#include "activation_config.h"

namespace flashinfer {

void act_and_mul(const ActAndMulParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::act_and_mul<T, ACTIVATION>(params, where))
}

}  // namespace flashinfer
