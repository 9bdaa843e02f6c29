// Gradients of norms on the CPU, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/norm_backward.h>

#include "norm_backward_config.h"

namespace flashinfer {

int64_t norm_backward_parts(int64_t num_rows, int64_t hidden_size, const Launch&) {
  return cpu::norm_backward_parts(num_rows, hidden_size);
}

void rms_norm_backward(const RmsNormBackwardParams& params, const Launch&) {
  if (params.dtype == DType::kFloat64) return cpu::rms_norm_backward<double>(params);
  DISPATCH_dtype(params.dtype, T, cpu::rms_norm_backward<T>(params))
}

void layer_norm_backward(const LayerNormBackwardParams& params, const Launch&) {
  const bool mixed = params.affine_is_float32;
  if (params.dtype == DType::kFloat64)
    return mixed ? cpu::layer_norm_backward<double, float>(params) : cpu::layer_norm_backward<double, double>(params);
  DISPATCH_dtype(params.dtype, T,
                 mixed ? cpu::layer_norm_backward<T, float>(params) : cpu::layer_norm_backward<T, T>(params))
}

}  // namespace flashinfer
