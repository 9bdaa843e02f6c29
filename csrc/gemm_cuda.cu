// Grouped GEMM on CUDA: kernels for one arch if they serve the call, else the portable ones by element types.
#include <flashinfer/common/dispatch.h>
#include <flashinfer/common/registered.h>

#include <flashinfer/cuda/gemm.cuh>
#include <string>

namespace flashinfer {
namespace {

// Run kernels for one arch and return null, or return the reason why none serves the call.
const char* run_for_arch(const GemmParams& params, const Launch& where) {
  const char* reason = "this module has no kernels for it";
  Registered<cuda::GemmKernels>::any([&](const cuda::GemmKernels& kernels) {
    if (params.arch == 0 || params.arch == kernels.arch) reason = kernels.run(params, where);
    return reason == nullptr;
  });
  return reason;
}

}  // namespace

bool grouped_gemm_with_gate(const GemmParams& params, const Launch& where) {
  return run_for_arch(params, where) == nullptr;
}

void grouped_gemm(const GemmParams& params, const Launch& where) {
  const char* reason = run_for_arch(params, where);
  if (reason == nullptr) return;
  if (params.arch)
    throw_value_error("grouped_gemm: backend: got 'sm" + std::to_string(params.arch) +
                      "', which cannot serve: " + reason);
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
