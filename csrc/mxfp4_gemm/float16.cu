// Grouped GEMM of rows of float16 and MXFP4 matrices on CUDA.
#include <flashinfer/cuda/gemm/mxfp4/kernel.cuh>
#include <flashinfer/cuda/mxfp4_gemm.cuh>

namespace flashinfer::cuda {

void mxfp4_gemm_float16(const Mxfp4GemmParams& params, const Launch& where) { mxfp4_gemm<half_t>(params, where); }

}  // namespace flashinfer::cuda
