// Rotary embedding on the CPU, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/rope.h>

#include "rope_config.h"

namespace flashinfer {

void rope(const RopeParams& params, const Launch&) {
  if (params.dtype == DType::kFloat64) return cpu::rope<double>(params);
  DISPATCH_dtype(params.dtype, T, cpu::rope<T>(params))
}

}  // namespace flashinfer
