// Grouped GEMM on CUDA: selects the kernel by element types.
#include <flashinfer/common/dispatch.h>
#include <flashinfer/cuda/gemm/sm90/serves.h>

#include <flashinfer/cuda/gemm.cuh>
#include <string>

namespace flashinfer {
namespace {

// Run a Hopper kernel and return null, or return the reason why none serves the call. The kernels are parts
// of this module, because some reasons, such as unaligned pointers, are known only per call, even in a graph.
const char* run_on_hopper(const GemmParams& params, const Launch& where) {
  if (const char* reason = cuda::sm90::why_not_hopper(params)) return reason;
  const bool by_depth = params.b_stride_k == 1;
  auto run = cuda::hopper_gemm_e4m3;
  if (params.a_dtype == DType::kFloat16)
    run = by_depth ? cuda::hopper_gemm_float16_by_depth : cuda::hopper_gemm_float16_by_column;
  if (params.a_dtype == DType::kBFloat16)
    run = by_depth ? cuda::hopper_gemm_bfloat16_by_depth : cuda::hopper_gemm_bfloat16_by_column;
  return run(params, where) ? nullptr
                            : "this module has no kernels for 9.0a, or the GPU has another compute capability";
}

}  // namespace

bool grouped_gemm_with_gate(const GemmParams& params, const Launch& where) {
  return cuda::sm90::serves_gate(params) && run_on_hopper(params, where) == nullptr;
}

void grouped_gemm(const GemmParams& params, const Launch& where) {
  const char* reason = run_on_hopper(params, where);
  if (reason == nullptr) return;
  if (params.sm90) throw_value_error(std::string("grouped_gemm: backend: got 'sm90', which cannot serve: ") + reason);
  switch (params.a_dtype) {
    case DType::kFloat32: return cuda::grouped_gemm_float32(params, where);
    case DType::kFloat16: return cuda::grouped_gemm_float16(params, where);
    case DType::kBFloat16: return cuda::grouped_gemm_bfloat16(params, where);
    default: break;
  }
  using Run = void (*)(const GemmParams&, const Launch&);
  constexpr Run kRuns[2][2][2] = {{{cuda::grouped_gemm_e4m3_e4m3, cuda::grouped_gemm_e4m3_e4m3_blocks},
                                   {cuda::grouped_gemm_e4m3_e5m2, cuda::grouped_gemm_e4m3_e5m2_blocks}},
                                  {{cuda::grouped_gemm_e5m2_e4m3, cuda::grouped_gemm_e5m2_e4m3_blocks},
                                   {cuda::grouped_gemm_e5m2_e5m2, cuda::grouped_gemm_e5m2_e5m2_blocks}}};
  kRuns[params.a_dtype == DType::kFloat8E5M2][params.b_dtype == DType::kFloat8E5M2][params.scale_depth != 0](params,
                                                                                                             where);
}

}  // namespace flashinfer
