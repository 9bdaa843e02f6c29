// Instance of the chunk kernels: float16, up to 128 keys.
#include <flashinfer/cuda/delta_rule/chunk/forward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_chunks<half_t>(const DeltaRuleParams& p, const Launch& where);

}  // namespace flashinfer::cuda
