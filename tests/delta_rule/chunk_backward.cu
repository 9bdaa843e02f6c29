// Chunk gradients, compiled but not run: every CTA shape, for the longest heads.
#include <flashinfer/cuda/delta_rule/chunk/backward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_chunks_backward<bfloat16_t, 128>(const DeltaRuleBackwardParams& params, const Launch& where);

}  // namespace flashinfer::cuda
