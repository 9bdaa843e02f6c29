// Transpose an 8x8 matrix of 16-bit elements between the lanes of a warp. A lane supplies elements 2 (lane %
// 4) and the next one of row lane / 4, and receives those of column lane / 4.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

}  // namespace flashinfer::cuda::ptx
