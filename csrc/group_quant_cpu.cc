// Quantisation of groups on the CPU, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/group_quant.h>

#include "group_quant_config.h"

namespace flashinfer {

void group_quant(const GroupQuantParams& params, const Launch&) {
  DISPATCH_dtype(params.dtype, T,
                 params.output_dtype == DType::kInt8 ? cpu::group_quant<T, int8_t>(params)
                                                     : cpu::group_quant<T, fp8_e4m3_t>(params))
}

}  // namespace flashinfer
