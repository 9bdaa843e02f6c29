// Chunk forward kernels with a decay per channel, compiled but not run: every CTA shape, for the longest
// heads.
#include <flashinfer/cuda/delta_rule/chunk/forward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_channels<bfloat16_t, 128>(const DeltaRuleParams& params, const Launch& where);

}  // namespace flashinfer::cuda
