// The CUDA kernels of the delta rule for the element types of this module.
#include <flashinfer/cuda/delta_rule.cuh>

#include "delta_rule_config.h"

namespace flashinfer {

void delta_rule(const DeltaRuleParams& params, const Launch& where) {
  DISPATCH_dtype(params.in.dtype, T, cuda::delta_rule<T>(params, where))
}

}  // namespace flashinfer
