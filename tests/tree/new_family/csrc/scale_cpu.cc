// Instances of the scale family's CPU kernel for the element types and powers of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/scale.h>

#include "scale_config.h"

namespace flashinfer {

void scale(const ScaleParams& params, const Launch&) {
  DISPATCH_dtype(params.dtype, T, DISPATCH_power(params.power, POWER, cpu::scale<T, POWER>(params)))
}

}  // namespace flashinfer
