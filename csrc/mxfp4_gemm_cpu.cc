// Grouped GEMM of 16-bit rows and MXFP4 matrices on the CPU.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/mxfp4_gemm.h>

namespace flashinfer {

void mxfp4_gemm(const Mxfp4GemmParams& params, const Launch&) { cpu::mxfp4_gemm(params); }

}  // namespace flashinfer
