// Clocks, and the multiprocessor of a thread.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

// Return nanoseconds, equal on all multiprocessors. Ticks may be coarse.
__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// Return the cycles of this multiprocessor.
__device__ __forceinline__ uint64_t clock() {
  uint64_t cycles;
  asm volatile("mov.u64 %0, %clock64;" : "=l"(cycles));
  return cycles;
}

// Return the low half of the cycles. Earlier loads and stores stay before it.
__device__ __forceinline__ uint32_t clock_low() {
  uint32_t cycles;
  asm volatile("mov.u32 %0, %clock;" : "=r"(cycles)::"memory");
  return cycles;
}

__device__ __forceinline__ uint32_t multiprocessor() {
  uint32_t number;
  asm volatile("mov.u32 %0, %smid;" : "=r"(number));
  return number;
}

}  // namespace flashinfer::cuda::ptx
