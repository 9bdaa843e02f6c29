// What warps of a block that work together need beside __syncthreads().
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

// Waits for kThreads threads at barrier `id`, 1 to 15; __syncthreads() is barrier 0.
template <int kThreads>
__device__ __forceinline__ void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

}  // namespace flashinfer::cuda::ptx
