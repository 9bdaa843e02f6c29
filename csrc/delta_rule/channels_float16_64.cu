// The delta rule over chunks on CUDA with a gate of each channel, float16, of keys of up to 64.
#include <flashinfer/cuda/delta_rule/chunk/forward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_channels<half_t, 64>(const DeltaRuleParams& p, const Launch& stream);

}  // namespace flashinfer::cuda
