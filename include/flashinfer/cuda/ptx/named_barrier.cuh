// What warps of a block that work together need beside __syncthreads().
#pragma once

namespace flashinfer::cuda::ptx {

// Waits for kThreads threads at barrier `id`, 1 to 15; __syncthreads() is barrier 0.
template <int kThreads>
__device__ __forceinline__ void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Is one of kThreads threads at barrier `id` without waiting for the others.
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace flashinfer::cuda::ptx
