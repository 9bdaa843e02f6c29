// Gradients of the delta rule over chunks on CUDA with more than 128 keys, float16.
#include <flashinfer/cuda/delta_rule/chunk/backward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_wide_chunks_backward<half_t>(const DeltaRuleBackwardParams& p, const Launch& stream);

}  // namespace flashinfer::cuda
