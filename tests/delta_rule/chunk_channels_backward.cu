// The kernels of the gradients over chunks with a gate of each channel, for the compiler alone, in the way of chunk.cu.
#include <flashinfer/cuda/delta_rule/chunk/backward/launch.cuh>

namespace flashinfer::cuda {

template void delta_rule_channels_backward<bfloat16_t, 128>(const DeltaRuleBackwardParams& params, const Launch& where);

}  // namespace flashinfer::cuda
