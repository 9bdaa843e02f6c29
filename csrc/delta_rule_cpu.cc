// CPU kernels of the delta rule, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/delta_rule/forward.h>

#include "delta_rule_config.h"

namespace flashinfer {

int64_t delta_rule_chunk_workspace(const DeltaRuleInputs&, const Launch&) { return 0; }

void delta_rule(const DeltaRuleParams& params, const Launch&) {
  if (params.in.dtype == DType::kFloat64) return cpu::delta_rule<double>(params);
  DISPATCH_dtype(params.in.dtype, T, cpu::delta_rule<T>(params))
}

}  // namespace flashinfer
