// Gradients of the delta rule over chunks on CUDA with a gate of each channel, bfloat16, of keys of up to 64.
#include <flashinfer/cuda/delta_rule/chunk/backward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_channels_backward<bfloat16_t, 64>(const DeltaRuleBackwardParams& p, const Launch& stream);

}  // namespace flashinfer::cuda
