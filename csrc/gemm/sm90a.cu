// Register the 9.0a kernels of grouped GEMM, and select the instance by element type and layout.
#include <flashinfer/common/registered.h>
#include <flashinfer/cuda/gemm/sm90/instances.h>
#include <flashinfer/cuda/gemm/sm90/serves.h>

#include <flashinfer/cuda/gemm.cuh>

namespace flashinfer::cuda {
namespace {

const char* run(const GemmParams& params, const Launch& where) {
  if (const char* reason = sm90::reason_against(params)) return reason;
  if (params.gate != GemmGate::kNone && !sm90::serves_gate(params)) return "the gate cannot be fused";
  const bool by_depth = params.b_stride_k == 1;
  auto instance = sm90::gemm_e4m3;
  if (params.a_dtype == DType::kFloat16)
    instance = by_depth ? sm90::gemm_float16_by_depth : sm90::gemm_float16_by_column;
  if (params.a_dtype == DType::kBFloat16)
    instance = by_depth ? sm90::gemm_bfloat16_by_depth : sm90::gemm_bfloat16_by_column;
  return instance(params, where) ? nullptr
                                 : "this module has no kernels for 9.0a, or the GPU has another compute capability";
}

const Registered<GemmKernels> kKernels({90, run});

}  // namespace
}  // namespace flashinfer::cuda
