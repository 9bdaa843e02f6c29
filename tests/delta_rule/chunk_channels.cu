// The kernels over chunks with a gate of each channel, for the compiler alone, in the way of chunk.cu.
#include <flashinfer/cuda/delta_rule/chunk/forward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_channels<bfloat16_t, 128>(const DeltaRuleParams& params, const Launch& where);

}  // namespace flashinfer::cuda
