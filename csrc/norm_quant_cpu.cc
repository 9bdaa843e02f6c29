// RMSNorm with a quantised result on the CPU, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/norm_quant.h>

#include "norm_quant_config.h"

namespace flashinfer {

void rms_norm_quant(const RmsNormQuantParams& params, const Launch&) {
  DISPATCH_dtype(
      params.dtype, T, switch (params.output_dtype) {
        case DType::kInt8: return cpu::rms_norm_quant<T, int8_t>(params);
        case DType::kFloat8E5M2: return cpu::rms_norm_quant<T, fp8_e5m2_t>(params);
        default: return cpu::rms_norm_quant<T, fp8_e4m3_t>(params);
      })
}

}  // namespace flashinfer
