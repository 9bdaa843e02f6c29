// The CUDA kernels of the delta rule's gradients: a part of this file for each element type.
#include <flashinfer/cuda/delta_rule_backward.cuh>

#include <iterator>

#include "delta_rule_backward_config.h"

namespace flashinfer {

template <int kPart>
void delta_rule_backward_part(const DeltaRuleBackwardParams& params, const Launch& where);

template <>
void delta_rule_backward_part<FLASHINFER_PART>(const DeltaRuleBackwardParams& params, const Launch& where) {
  cuda::delta_rule_backward<T>(params, where);
}

#if FLASHINFER_PART == 0

int64_t delta_rule_workspace(const DeltaRuleInputs& inputs, const Launch&) {
  return cuda::delta_rule_workspace(inputs);
}

void delta_rule_backward(const DeltaRuleBackwardParams& params, const Launch& where) {
  const int part = find_row(kParts, std::tuple<DType>(params.in.dtype));
  if (part < 0) throw_not_covered("dtype", to_string(params.in.dtype), kDtypeText);
  call_numbered<std::size(kParts)>(part, [&](auto number) { delta_rule_backward_part<number>(params, where); });
}

#endif

}  // namespace flashinfer
