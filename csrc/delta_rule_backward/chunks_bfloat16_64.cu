// Instance of the chunk gradients: bfloat16, up to 64 keys.
#include <flashinfer/cuda/delta_rule/chunk/backward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_chunks_backward<bfloat16_t, 64>(const DeltaRuleBackwardParams& p, const Launch& where);

}  // namespace flashinfer::cuda
