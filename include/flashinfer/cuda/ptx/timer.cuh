// Clocks and where a thread runs.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

// Nanoseconds, the same on all multiprocessors; ticks may be coarse.
__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// Cycles of this multiprocessor.
__device__ __forceinline__ uint64_t clock() {
  uint64_t cycles;
  asm volatile("mov.u64 %0, %clock64;" : "=l"(cycles));
  return cycles;
}

// The low half of it. Loads and stores in front of it stay there.
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
