// CPU kernels of the delta rule's gradients, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/delta_rule/backward.h>

#include "delta_rule_backward_config.h"

namespace flashinfer {

int64_t delta_rule_workspace(const DeltaRuleBackwardParams&, const Launch&) { return 0; }

void delta_rule_backward(const DeltaRuleBackwardParams& params, const Launch&) {
  if (params.in.dtype == DType::kFloat64) return cpu::delta_rule_backward<double>(params);
  DISPATCH_dtype(params.in.dtype, T, cpu::delta_rule_backward<T>(params))
}

}  // namespace flashinfer
