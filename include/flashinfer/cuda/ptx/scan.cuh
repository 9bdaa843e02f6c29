// Inclusive prefix sums over the lanes of a warp.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

__device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t value) {
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    asm volatile(
        "{\n"
        ".reg .pred there;\n"
        ".reg .b32 before;\n"
        "shfl.sync.up.b32 before|there, %0, %1, 0, 0xffffffff;\n"
        "@there add.u32 %0, %0, before;\n"
        "}"
        : "+r"(value)
        : "r"(apart));
  }
  return value;
}

}  // namespace flashinfer::cuda::ptx
