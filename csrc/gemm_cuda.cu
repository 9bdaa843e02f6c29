// The gemm family's CUDA kernels: which of them, by the types of numbers.
#include <flashinfer/cuda/gemm.cuh>

namespace flashinfer {

void grouped_gemm(const GemmParams& params, const Launch& where) {
  const bool b_is_e4m3 = params.b_dtype == DType::kFloat8E4M3;
  switch (params.a_dtype) {
    case DType::kFloat32: return cuda::grouped_gemm_float32(params, where);
    case DType::kFloat16: return cuda::grouped_gemm_float16(params, where);
    case DType::kBFloat16: return cuda::grouped_gemm_bfloat16(params, where);
    case DType::kFloat8E4M3:
      return b_is_e4m3 ? cuda::grouped_gemm_e4m3_e4m3(params, where) : cuda::grouped_gemm_e4m3_e5m2(params, where);
    default:
      return b_is_e4m3 ? cuda::grouped_gemm_e5m2_e4m3(params, where) : cuda::grouped_gemm_e5m2_e5m2(params, where);
  }
}

}  // namespace flashinfer
