// Grouped GEMM on CUDA for bfloat16.
#include <flashinfer/cuda/gemm.cuh>
#include <flashinfer/cuda/gemm/kernel.cuh>

namespace flashinfer::cuda {

void grouped_gemm_bfloat16(const GemmParams& params, const Launch& where) {
  launch_grouped_gemm_by_layout<bfloat16_t>(params, where);
}

}  // namespace flashinfer::cuda
