// CPU kernels of the gated norm's gradients, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/gated_norm_backward.h>

#include "gated_norm_backward_config.h"

namespace flashinfer {

int64_t gated_norm_backward_parts(int64_t num_rows, int64_t num_groups, int64_t group_size, const Launch&) {
  return cpu::norm_backward_parts(num_rows, num_groups * group_size);
}

void gated_rms_norm_backward(const GatedRmsNormBackwardParams& params, const Launch&) {
  if (params.dtype == DType::kFloat64) return cpu::gated_rms_norm_backward<double>(params);
  DISPATCH_dtype(params.dtype, T, cpu::gated_rms_norm_backward<T>(params))
}

}  // namespace flashinfer
