// Rotary embedding with 8-bit results on the CPU, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/rope_quant.h>

#include "rope_quant_config.h"

namespace flashinfer {

void rope_quant(const RopeQuantParams& params, const Launch&) {
  DISPATCH_dtype(params.dtype, T,
                 params.output_dtype == DType::kFloat8E5M2 ? cpu::rope_quant<T, fp8_e5m2_t>(params)
                                                           : cpu::rope_quant<T, fp8_e4m3_t>(params))
}

}  // namespace flashinfer
