// Grouped GEMM on Hopper for e4m3.
#include <flashinfer/cuda/gemm/sm90/instances.h>
#include <flashinfer/cuda/gemm/sm90/launch.cuh>

namespace flashinfer::cuda {

bool hopper_gemm_e4m3(const GemmParams& params, const Launch& where) {
  return sm90::launch_hopper_gemm<fp8_e4m3_t, true>(params, where);
}

}  // namespace flashinfer::cuda
