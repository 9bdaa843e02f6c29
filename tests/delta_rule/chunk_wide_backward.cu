// Chunk gradients with more than 128 keys, compiled but not run: every CTA shape, for the longest heads.
#include <flashinfer/cuda/delta_rule/chunk/backward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_wide_chunks_backward<bfloat16_t>(const DeltaRuleBackwardParams& params, const Launch& where);

}  // namespace flashinfer::cuda
