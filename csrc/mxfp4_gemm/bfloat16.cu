// Grouped GEMM of rows of bfloat16 and MXFP4 matrices on CUDA.
#include <flashinfer/cuda/gemm/mxfp4/kernel.cuh>
#include <flashinfer/cuda/mxfp4_gemm.cuh>

namespace flashinfer::cuda {

void mxfp4_gemm_bfloat16(const Mxfp4GemmParams& params, const Launch& where) { mxfp4_gemm<bfloat16_t>(params, where); }

}  // namespace flashinfer::cuda
