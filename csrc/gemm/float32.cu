// Grouped GEMM on CUDA for float32.
#include <flashinfer/cuda/gemm.cuh>
#include <flashinfer/cuda/gemm/kernel.cuh>

namespace flashinfer::cuda {

void grouped_gemm_float32(const GemmParams& params, const Launch& where) {
  launch_grouped_gemm_by_layout<float>(params, where);
}

}  // namespace flashinfer::cuda
