// CPU kernels of the gated norm, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/gated_norm.h>

#include "gated_norm_config.h"

namespace flashinfer {

void gated_rms_norm(const GatedRmsNormParams& params, const Launch&) {
  if (params.dtype == DType::kFloat64) return cpu::gated_rms_norm<double>(params);
  DISPATCH_dtype(params.dtype, T, cpu::gated_rms_norm<T>(params))
}

}  // namespace flashinfer
