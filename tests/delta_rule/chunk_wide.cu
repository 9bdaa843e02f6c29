// The kernels over chunks with more than 128 keys, for the compiler alone, in the way of chunk.cu.
#include <flashinfer/cuda/delta_rule/chunk/forward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_wide_chunks<bfloat16_t>(const DeltaRuleParams& params, const Launch& where);

}  // namespace flashinfer::cuda
