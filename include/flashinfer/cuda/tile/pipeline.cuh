// Stages of smem that copies fill in rotation while one of them is in use.
#pragma once

#include <flashinfer/cuda/ptx/cp_async.cuh>

namespace flashinfer::cuda {

// Waits until at most `pending` of this thread's groups of copies are in flight, for up to 4 stages.
__device__ __forceinline__ void wait_for_copies(int pending) {
  if (pending == 0) {
    ptx::cp_async_wait<0>();
  } else if (pending == 1) {
    ptx::cp_async_wait<1>();
  } else {
    ptx::cp_async_wait<2>();
  }
}

// The current stage of `count` stages in rotation.
struct Stages {
  int count, current = 0;

  __device__ __forceinline__ explicit Stages(int count_) : count(count_) {}
  __device__ __forceinline__ int before() const { return current == 0 ? count - 1 : current - 1; }
  __device__ __forceinline__ int after() const { return current + 1 < count ? current + 1 : 0; }
  __device__ __forceinline__ void advance() { current = after(); }
};

}  // namespace flashinfer::cuda
