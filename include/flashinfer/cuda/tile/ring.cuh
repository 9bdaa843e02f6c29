// A ring of stages in smem between producer and consumer warps. Use n has stage n % kStages, and each side
// counts its own uses. Only a thread that has waited for a stage may release it: an early arrival would
// complete the previous phase.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/ptx/mbarrier.cuh>

namespace flashinfer::cuda {

template <int kStages_>
struct Ring {
  static constexpr int kStages = kStages_, kBytes = 16 * kStages;
  uint32_t barriers;  // in smem: kStages full barriers, then kStages empty ones

  // Runs in one thread, before __syncthreads().
  __device__ __forceinline__ void init(uint32_t full_arrivals, uint32_t empty_arrivals) const {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(barriers + 8 * i, full_arrivals);
      ptx::mbarrier_init(barriers + 8 * (kStages + i), empty_arrivals);
    }
  }

  __device__ __forceinline__ static int stage(int use) { return use % kStages; }
  __device__ __forceinline__ static uint32_t parity(int use) { return (use / kStages) & 1; }
  __device__ __forceinline__ uint32_t full(int use) const { return barriers + 8 * stage(use); }
  __device__ __forceinline__ uint32_t empty(int use) const { return full(use) + 8 * kStages; }

  __device__ __forceinline__ void wait_full(int use) const { ptx::mbarrier_wait(full(use), parity(use)); }
  __device__ __forceinline__ void wait_empty(int use) const { ptx::mbarrier_wait(empty(use), parity(use) ^ 1); }
  __device__ __forceinline__ void arrive_full(int use) const { ptx::mbarrier_arrive(full(use)); }
  __device__ __forceinline__ void release(int use) const { ptx::mbarrier_arrive(empty(use)); }
};

}  // namespace flashinfer::cuda
