// Gradients of the delta rule over chunks on CUDA with more than 128 keys, bfloat16.
#include <flashinfer/cuda/delta_rule/chunk/backward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_wide_chunks_backward<bfloat16_t>(const DeltaRuleBackwardParams& p, const Launch& stream);

}  // namespace flashinfer::cuda
