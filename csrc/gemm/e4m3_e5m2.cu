// Grouped GEMM on CUDA for rows of e4m3 and matrices of e5m2.
#include <flashinfer/cuda/gemm.cuh>
#include <flashinfer/cuda/gemm/kernel.cuh>

namespace flashinfer::cuda {

void grouped_gemm_e4m3_e5m2(const GemmParams& params, const Launch& where) {
  launch_grouped_gemm<fp8_e4m3_t, fp8_e5m2_t, true, false>(params, where);
}

}  // namespace flashinfer::cuda
