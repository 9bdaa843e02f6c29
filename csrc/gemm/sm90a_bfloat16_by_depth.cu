// Grouped GEMM on Hopper for bfloat16, with b contiguous along k.
#include <flashinfer/cuda/gemm/sm90/instances.h>
#include <flashinfer/cuda/gemm/sm90/launch.cuh>

namespace flashinfer::cuda::sm90 {

bool gemm_bfloat16_by_depth(const GemmParams& params, const Launch& where) {
  return launch_gemm<bfloat16_t, true>(params, where);
}

}  // namespace flashinfer::cuda::sm90
