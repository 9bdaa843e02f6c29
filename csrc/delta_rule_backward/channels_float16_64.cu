// Instance of the chunk gradients: float16, a decay per channel, up to 64 keys.
#include <flashinfer/cuda/delta_rule/chunk/backward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_channels_backward<half_t, 64>(const DeltaRuleBackwardParams& p, const Launch& where);

}  // namespace flashinfer::cuda
