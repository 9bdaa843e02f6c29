// Grouped GEMM on CUDA for float16.
#include <flashinfer/cuda/gemm.cuh>
#include <flashinfer/cuda/gemm/kernel.cuh>

namespace flashinfer::cuda {

void grouped_gemm_float16(const GemmParams& params, const Launch& where) {
  launch_grouped_gemm_by_layout<half_t>(params, where);
}

}  // namespace flashinfer::cuda
