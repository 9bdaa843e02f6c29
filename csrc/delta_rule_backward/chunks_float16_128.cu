// Instance of the chunk gradients: float16, up to 128 keys.
#include <flashinfer/cuda/delta_rule/chunk/backward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_chunks_backward<half_t, 128>(const DeltaRuleBackwardParams& p, const Launch& where);

}  // namespace flashinfer::cuda
