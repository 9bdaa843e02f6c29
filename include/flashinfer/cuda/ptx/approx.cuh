// Approximations that are one instruction each. Results and arguments that are not normal numbers become zero.
#pragma once

namespace flashinfer::cuda::ptx {

// 2^x, relative error 2^-22
__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, relative error 2^-23
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashinfer::cuda::ptx
