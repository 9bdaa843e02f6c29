// Chunk forward kernels with more than 128 keys, compiled but not run: every CTA shape, for the longest
// heads.
#include <flashinfer/cuda/delta_rule/chunk/forward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_wide_chunks<bfloat16_t>(const DeltaRuleParams& params, const Launch& where);

}  // namespace flashinfer::cuda
