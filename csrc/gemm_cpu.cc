// The gemm family's CPU kernels: element types are chosen at run time, where rows are packed.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/gemm.h>

namespace flashinfer {

void grouped_gemm(const GemmParams& params, const Launch&) { cpu::grouped_gemm(params); }

}  // namespace flashinfer
