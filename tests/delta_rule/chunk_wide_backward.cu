// The kernels of the gradients over chunks with more than 128 keys, for the compiler alone, in the way of chunk.cu.
#include <flashinfer/cuda/delta_rule/chunk/backward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_wide_chunks_backward<bfloat16_t>(const DeltaRuleBackwardParams& params, const Launch& where);

}  // namespace flashinfer::cuda
