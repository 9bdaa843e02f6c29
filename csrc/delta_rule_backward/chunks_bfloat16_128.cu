// Gradients of the delta rule over chunks on CUDA, bfloat16, of keys of up to 128.
#include <flashinfer/cuda/delta_rule/chunk/backward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_chunks_backward<bfloat16_t, 128>(const DeltaRuleBackwardParams& p, const Launch& stream);

}  // namespace flashinfer::cuda
