// The gemm family's kernels for Hopper alone, for bfloat16.
#include <flashinfer/cuda/gemm.cuh>
#include <flashinfer/cuda/gemm/sm90/launch.cuh>

namespace flashinfer::cuda {

bool hopper_gemm_bfloat16(const GemmParams& params, const Launch& where) {
  return sm90::launch_hopper_gemm<bfloat16_t>(params, where);
}

}  // namespace flashinfer::cuda
