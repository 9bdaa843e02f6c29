// Grouped GEMM on Hopper for e4m3.
#include <flashinfer/cuda/gemm/sm90/instances.h>
#include <flashinfer/cuda/gemm/sm90/launch.cuh>

namespace flashinfer::cuda::sm90 {

bool gemm_e4m3(const GemmParams& params, const Launch& where) { return launch_gemm<fp8_e4m3_t, true>(params, where); }

}  // namespace flashinfer::cuda::sm90
