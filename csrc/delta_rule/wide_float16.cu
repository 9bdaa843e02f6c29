// Instance of the chunk kernels: float16, 129 to 256 keys.
#include <flashinfer/cuda/delta_rule/chunk/forward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_wide_chunks<half_t>(const DeltaRuleParams& p, const Launch& where);

}  // namespace flashinfer::cuda
