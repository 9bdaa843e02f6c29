// The delta rule over chunks on CUDA with more than 128 keys, float16.
#include <flashinfer/cuda/delta_rule/chunk/forward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_wide_chunks<half_t>(const DeltaRuleParams& p, const Launch& stream);

}  // namespace flashinfer::cuda
