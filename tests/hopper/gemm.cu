// The Hopper kernels of grouped products, for tests of what the compilers make of them.
#include <flashinfer/cuda/gemm/sm90/kernel.cuh>

namespace flashinfer::cuda::sm90 {

#define KERNEL(...)                                                                     \
  template __global__ void gemm_kernel<__VA_ARGS__>(const __grid_constant__ GemmParams, \
                                                    const __grid_constant__ GemmMaps, const GemmSettings)
KERNEL(GemmShape<bfloat16_t, true, GemmSize::kMany>);
KERNEL(GemmShape<half_t, false, GemmSize::kMany>);
KERNEL(GemmShape<bfloat16_t, true, GemmSize::kFew>);
KERNEL(GemmShape<fp8_e4m3_t, true, GemmSize::kMany>);

}  // namespace flashinfer::cuda::sm90
