// sm_90a kernels of attention's gradients for bfloat16.
#include <flashinfer/cuda/attention/backward/sm90.h>
#include <flashinfer/cuda/attention/backward/sm90/launch.cuh>

namespace flashinfer::cuda {

int64_t plan_hopper_backward_bfloat16(PrefillBackwardParams& params, const Launch& where) {
  return sm90::plan_hopper<bfloat16_t>(params, where);
}

void hopper_backward_bfloat16(const PrefillBackwardParams& params, const Launch& where) {
  sm90::launch_hopper<bfloat16_t>(params, where);
}

}  // namespace flashinfer::cuda
