// Instance of the chunk gradients: bfloat16, 129 to 256 keys.
#include <flashinfer/cuda/delta_rule/chunk/backward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_wide_chunks_backward<bfloat16_t>(const DeltaRuleBackwardParams& p, const Launch& where);

}  // namespace flashinfer::cuda
