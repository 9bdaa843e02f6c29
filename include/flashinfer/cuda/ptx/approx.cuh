// Approximations in one instruction each. Denormal arguments and results become zero.
#pragma once

namespace flashinfer::cuda::ptx {

// Return 2^x with a relative error of 2^-22.
__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Return 1 / x with a relative error of 2^-23.
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashinfer::cuda::ptx
