// Calls of grouped GEMM's dispatcher with kernels for two archs that other files would register. Prints the
// kernels that run: the arch, or 80 for the portable ones.
#include "../../csrc/gemm_cuda.cu"

#include <cstdio>
#include <stdexcept>

namespace flashinfer::cuda {

int ran = 0;

#define PORTABLE(name) \
  void name(const GemmParams&, const Launch&) { ran = 80; }
PORTABLE(grouped_gemm_float32)
PORTABLE(grouped_gemm_float16)
PORTABLE(grouped_gemm_bfloat16)
PORTABLE(grouped_gemm_e4m3_e4m3)
PORTABLE(grouped_gemm_e4m3_e4m3_blocks)
PORTABLE(grouped_gemm_e4m3_e5m2)
PORTABLE(grouped_gemm_e4m3_e5m2_blocks)
PORTABLE(grouped_gemm_e5m2_e4m3)
PORTABLE(grouped_gemm_e5m2_e4m3_blocks)
PORTABLE(grouped_gemm_e5m2_e5m2)
PORTABLE(grouped_gemm_e5m2_e5m2_blocks)

const Registered<GemmKernels> kFirst({90, [](const GemmParams& p, const Launch&) -> const char* {
                                        if (p.a_dtype == DType::kFloat32) return "no kernel reads float32";
                                        return ran = 90, nullptr;
                                      }});
const Registered<GemmKernels> kSecond({100, [](const GemmParams& p, const Launch&) -> const char* {
                                         if (p.a_dtype != DType::kFloat8E4M3) return "only float8_e4m3fn is read";
                                         return ran = 100, nullptr;
                                       }});

}  // namespace flashinfer::cuda

int main() {
  using namespace flashinfer;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3}) {
    for (const int arch : {0, 90, 100, 120}) {
      GemmParams p{};
      p.a_dtype = p.b_dtype = dtype, p.arch = arch, cuda::ran = 0;
      std::printf("%s %d: ", to_string(dtype), arch);
      try {
        grouped_gemm(p, Launch{});
        std::printf("%d, %d with a gate\n", cuda::ran, grouped_gemm_with_gate(p, Launch{}));
      } catch (const std::exception& error) {
        std::printf("%s\n", error.what());
      }
    }
  }
}
