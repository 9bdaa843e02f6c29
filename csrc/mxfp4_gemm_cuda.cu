// Grouped GEMM of 16-bit rows and MXFP4 matrices on CUDA.
#include <flashinfer/cuda/mxfp4_gemm.cuh>

namespace flashinfer {

void mxfp4_gemm(const Mxfp4GemmParams& params, const Launch& where) {
  if (params.a_dtype == DType::kFloat16) return cuda::mxfp4_gemm_float16(params, where);
  cuda::mxfp4_gemm_bfloat16(params, where);
}

}  // namespace flashinfer
