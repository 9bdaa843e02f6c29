// Gradient of one activation function on the CPU, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/activation_backward.h>

#include "activation_backward_config.h"

namespace flashinfer {

void act_and_mul_backward(const ActAndMulBackwardParams& params, const Launch&) {
  if (params.dtype == DType::kFloat64) return cpu::act_and_mul_backward<double, ACTIVATION>(params);
  DISPATCH_dtype(params.dtype, T, cpu::act_and_mul_backward<T, ACTIVATION>(params))
}

}  // namespace flashinfer
