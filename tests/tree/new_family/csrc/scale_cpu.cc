// The scale family's CPU kernel for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/scale.h>

#include "scale_config.h"

namespace flashinfer {

void scale(const ScaleParams& params, const Launch&) { DISPATCH_dtype(params.dtype, T, cpu::scale<T>(params)) }

}  // namespace flashinfer
