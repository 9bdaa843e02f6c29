// CUDA kernels of the delta rule. Each element type is a part of this file. csrc/delta_rule has the chunk
// kernels.
#include <flashinfer/cuda/delta_rule/chunk/forward/launch.cuh>
#include <flashinfer/cuda/delta_rule/recurrent/forward.cuh>

#include "delta_rule_config.h"

namespace flashinfer::cuda {

extern template void delta_rule_chunks<half_t>(const DeltaRuleParams&, const Launch&);
extern template void delta_rule_chunks<bfloat16_t>(const DeltaRuleParams&, const Launch&);
extern template void delta_rule_wide_chunks<half_t>(const DeltaRuleParams&, const Launch&);
extern template void delta_rule_wide_chunks<bfloat16_t>(const DeltaRuleParams&, const Launch&);
extern template void delta_rule_channels<half_t, 64>(const DeltaRuleParams&, const Launch&);
extern template void delta_rule_channels<half_t, 128>(const DeltaRuleParams&, const Launch&);
extern template void delta_rule_channels<bfloat16_t, 64>(const DeltaRuleParams&, const Launch&);
extern template void delta_rule_channels<bfloat16_t, 128>(const DeltaRuleParams&, const Launch&);

}  // namespace flashinfer::cuda

namespace flashinfer {

template <int kPart>
int64_t delta_rule_chunk_workspace_part(const DeltaRuleInputs& inputs, const Launch& where);
template <int kPart>
void delta_rule_part(const DeltaRuleParams& params, const Launch& where);

template <>
int64_t delta_rule_chunk_workspace_part<FLASHINFER_PART>(const DeltaRuleInputs& inputs, const Launch& where) {
  return cuda::supports_chunks<T>(inputs, where) ? cuda::delta_chunk_workspace(inputs) : 0;
}

template <>
void delta_rule_part<FLASHINFER_PART>(const DeltaRuleParams& params, const Launch& where) {
  if constexpr (cuda::kIsHalfType<T>) {
    if (cuda::supports_chunks<T>(params.in, where)) {
      if (params.in.gk) return cuda::delta_rule_channels<T>(params, where);
      return params.in.key_dim > 128 ? cuda::delta_rule_wide_chunks<T>(params, where)
                                     : cuda::delta_rule_chunks<T>(params, where);
    }
  }
  cuda::delta_rule<T>(params, where);
}

#if FLASHINFER_PART == 0

int64_t delta_rule_chunk_workspace(const DeltaRuleInputs& inputs, const Launch& where) {
  int64_t bytes = 0;
  call_row("dtype", kParts, inputs.dtype, kDtypeText,
           [&](auto number) { bytes = delta_rule_chunk_workspace_part<number>(inputs, where); });
  return bytes;
}

void delta_rule(const DeltaRuleParams& params, const Launch& where) {
  call_row("dtype", kParts, params.in.dtype, kDtypeText, [&](auto number) { delta_rule_part<number>(params, where); });
}

#endif

}  // namespace flashinfer
