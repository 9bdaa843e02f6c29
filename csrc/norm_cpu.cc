// Norms on the CPU, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/norm.h>

#include "norm_config.h"

namespace flashinfer {

void rms_norm(const RmsNormParams& params, const Launch&) {
  if (params.dtype == DType::kFloat64) return cpu::rms_norm_float64(params);
  DISPATCH_dtype(params.dtype, T, cpu::rms_norm<T>(params))
}

void layer_norm(const LayerNormParams& params, const Launch&) {
  if (params.dtype == DType::kFloat64) return cpu::layer_norm_float64(params);
  DISPATCH_dtype(params.dtype, T,
                 params.affine_is_float32 ? cpu::layer_norm<T, float>(params) : cpu::layer_norm<T, T>(params))
}

}  // namespace flashinfer
