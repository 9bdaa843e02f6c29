// Grouped GEMM on the CPU. Element types are selected at run time, when rows are packed.
#include <flashinfer/common/dispatch.h>
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/fused_moe.h>
#include <flashinfer/cpu/gemm.h>

namespace flashinfer {

void grouped_gemm(const GemmParams& params, const Launch&) {
  if (params.arch)
    throw_value_error("grouped_gemm: backend: got 'sm" + std::to_string(params.arch) +
                      "' for tensors on the CPU, wanted 'auto' or 'cpu'");
  cpu::grouped_gemm(params);
}

bool grouped_gemm_with_gate(const GemmParams&, const Launch&) { return false; }

void gate_rows(const ActivateParams& params, const Launch&) {
  switch (params.dtype) {
    case DType::kFloat16: return cpu::activate_rows<half_t>(params);
    case DType::kBFloat16: return cpu::activate_rows<bfloat16_t>(params);
    default: return cpu::activate_rows<float>(params);
  }
}

}  // namespace flashinfer
