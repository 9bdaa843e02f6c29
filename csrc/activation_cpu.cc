// One activation function on the CPU, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/activation.h>

#include "activation_config.h"

namespace flashinfer {

void act_and_mul(const ActAndMulParams& params, const Launch&) {
  if (params.dtype == DType::kFloat64) return cpu::act_and_mul_float64<ACTIVATION>(params);
  DISPATCH_dtype(params.dtype, T, cpu::act_and_mul<T, ACTIVATION>(params))
}

}  // namespace flashinfer
