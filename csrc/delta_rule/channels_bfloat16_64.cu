// Instance of the chunk kernels: bfloat16, a decay per channel, up to 64 keys.
#include <flashinfer/cuda/delta_rule/chunk/forward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_channels<bfloat16_t, 64>(const DeltaRuleParams& p, const Launch& where);

}  // namespace flashinfer::cuda
