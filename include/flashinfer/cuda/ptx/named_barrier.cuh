// Barriers between some warps of a CTA, in addition to __syncthreads().
#pragma once

namespace flashinfer::cuda::ptx {

// Waits for kThreads threads at barrier `id`, 1 to 15. __syncthreads() uses barrier 0.
template <int kThreads>
__device__ __forceinline__ void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Arrives as one of kThreads threads at barrier `id` without waiting.
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace flashinfer::cuda::ptx
