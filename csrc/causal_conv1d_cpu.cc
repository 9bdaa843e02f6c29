// CPU kernels of the causal convolution, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/causal_conv1d.h>

#include "causal_conv1d_config.h"

namespace flashinfer {

void causal_conv1d(const CausalConv1dParams& params, const Launch&) {
  if (params.in.dtype == DType::kFloat64) return cpu::causal_conv1d<double>(params);
  DISPATCH_dtype(params.in.dtype, T, cpu::causal_conv1d<T>(params))
}

void causal_conv1d_update(const CausalConv1dUpdateParams& params, const Launch&) {
  if (params.dtype == DType::kFloat64) return cpu::causal_conv1d_update<double>(params);
  DISPATCH_dtype(params.dtype, T, cpu::causal_conv1d_update<T>(params))
}

}  // namespace flashinfer
