// Gradients of the delta rule over chunks on CUDA, float16, of keys of up to 64.
#include <flashinfer/cuda/delta_rule/chunk/backward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_chunks_backward<half_t, 64>(const DeltaRuleBackwardParams& p, const Launch& stream);

}  // namespace flashinfer::cuda
