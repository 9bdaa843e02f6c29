#include <flashinfer/cuda/gemm/sm90/kernel.cuh>
namespace flashinfer::cuda::sm90 {
#define KERNEL(...)                                                                            \
  template __global__ void hopper_gemm_kernel<__VA_ARGS__>(const __grid_constant__ GemmParams, \
                                                           const __grid_constant__ HopperMaps, const HopperSettings)
KERNEL(GemmShape<fp8_e4m3_t, true, GemmSize::FI_SIZE>);
}
