// Grouped GEMM on Hopper for float16, with b contiguous along k.
#include <flashinfer/cuda/gemm/sm90/instances.h>
#include <flashinfer/cuda/gemm/sm90/launch.cuh>

namespace flashinfer::cuda::sm90 {

bool gemm_float16_by_depth(const GemmParams& params, const Launch& where) {
  return launch_gemm<half_t, true>(params, where);
}

}  // namespace flashinfer::cuda::sm90
