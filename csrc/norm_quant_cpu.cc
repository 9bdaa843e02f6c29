// The norm_quant family's CPU kernels for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/norm_quant.h>

#include "norm_quant_config.h"

namespace flashinfer {

void rms_norm_quant(const RmsNormQuantParams& params, const Launch&) {
  const bool is_e5m2 = params.output_dtype == DType::kFloat8E5M2;
  DISPATCH_dtype(params.dtype, T,
                 is_e5m2 ? cpu::rms_norm_quant<T, fp8_e5m2_t>(params) : cpu::rms_norm_quant<T, fp8_e4m3_t>(params))
}

}  // namespace flashinfer
