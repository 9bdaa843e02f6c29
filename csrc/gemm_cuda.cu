// The gemm family's CUDA kernels: which of them, by the types of numbers.
#include <flashinfer/common/dispatch.h>
#include <flashinfer/cuda/gemm/sm90/serves.h>

#include <flashinfer/cuda/gemm.cuh>
#include <string>

namespace flashinfer {
namespace {

// Why those for Hopper alone did not do it, or null. They are parts of this module, not a module of their own: what
// they do not serve, pointers that are not aligned among it, is known when a call is here, also when a graph calls.
const char* run_on_hopper(const GemmParams& params, const Launch& where) {
  if (const char* reason = cuda::sm90::why_not_hopper(params)) return reason;
  bool done = false;
  switch (params.a_dtype) {
    case DType::kFloat16: done = cuda::hopper_gemm_float16(params, where); break;
    case DType::kBFloat16: done = cuda::hopper_gemm_bfloat16(params, where); break;
    default: done = cuda::hopper_gemm_e4m3(params, where);
  }
  return done ? nullptr : "this module has no kernels for 9.0a, or the GPU has another compute capability";
}

}  // namespace

void grouped_gemm(const GemmParams& params, const Launch& where) {
  const char* reason = run_on_hopper(params, where);
  if (reason == nullptr) return;
  if (params.sm90) throw_value_error(std::string("grouped_gemm: backend: got 'sm90', which cannot serve: ") + reason);
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
