// CUDA kernels of the delta rule's gradients. Each element type is a part of this file.
// csrc/delta_rule_backward has the chunk kernels.
#include <flashinfer/cuda/delta_rule/chunk/backward/launch.cuh>
#include <flashinfer/cuda/delta_rule/recurrent/backward.cuh>

#include "delta_rule_backward_config.h"

namespace flashinfer::cuda {

extern template void delta_rule_chunks_backward<half_t, 64>(const DeltaRuleBackwardParams&, const Launch&);
extern template void delta_rule_chunks_backward<half_t, 128>(const DeltaRuleBackwardParams&, const Launch&);
extern template void delta_rule_chunks_backward<bfloat16_t, 64>(const DeltaRuleBackwardParams&, const Launch&);
extern template void delta_rule_chunks_backward<bfloat16_t, 128>(const DeltaRuleBackwardParams&, const Launch&);
extern template void delta_rule_wide_chunks_backward<half_t>(const DeltaRuleBackwardParams&, const Launch&);
extern template void delta_rule_wide_chunks_backward<bfloat16_t>(const DeltaRuleBackwardParams&, const Launch&);
extern template void delta_rule_channels_backward<half_t, 64>(const DeltaRuleBackwardParams&, const Launch&);
extern template void delta_rule_channels_backward<half_t, 128>(const DeltaRuleBackwardParams&, const Launch&);
extern template void delta_rule_channels_backward<bfloat16_t, 64>(const DeltaRuleBackwardParams&, const Launch&);
extern template void delta_rule_channels_backward<bfloat16_t, 128>(const DeltaRuleBackwardParams&, const Launch&);

}  // namespace flashinfer::cuda

namespace flashinfer {

template <int kPart>
int64_t delta_rule_workspace_part(const DeltaRuleBackwardParams& params, const Launch& where);
template <int kPart>
void delta_rule_backward_part(const DeltaRuleBackwardParams& params, const Launch& where);

template <>
int64_t delta_rule_workspace_part<FLASHINFER_PART>(const DeltaRuleBackwardParams& params, const Launch& where) {
  return cuda::supports_chunks<T>(params, where) ? cuda::delta_chunk_backward_workspace(params.in)
                                                 : cuda::delta_rule_workspace(params.in);
}

template <>
void delta_rule_backward_part<FLASHINFER_PART>(const DeltaRuleBackwardParams& params, const Launch& where) {
  if constexpr (cuda::kIsHalfType<T>) {
    if (cuda::supports_chunks<T>(params, where)) {
      if (params.in.gk) return cuda::delta_rule_channels_backward<T>(params, where);
      return params.in.key_dim > 128 ? cuda::delta_rule_wide_chunks_backward<T>(params, where)
                                     : cuda::delta_rule_chunks_backward<T>(params, where);
    }
  }
  cuda::delta_rule_backward<T>(params, where);
}

#if FLASHINFER_PART == 0

int64_t delta_rule_workspace(const DeltaRuleBackwardParams& params, const Launch& where) {
  int64_t bytes = 0;
  call_row("dtype", kParts, params.in.dtype, kDtypeText,
           [&](auto number) { bytes = delta_rule_workspace_part<number>(params, where); });
  return bytes;
}

void delta_rule_backward(const DeltaRuleBackwardParams& params, const Launch& where) {
  call_row("dtype", kParts, params.in.dtype, kDtypeText,
           [&](auto number) { delta_rule_backward_part<number>(params, where); });
}

#endif

}  // namespace flashinfer
