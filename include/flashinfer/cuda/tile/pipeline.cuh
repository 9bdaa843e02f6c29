// Stages of smem for cp.async: one is computed while copies fill the others in rotation.
#pragma once

#include <flashinfer/cuda/ptx/cp_async.cuh>

namespace flashinfer::cuda {

// Wait until at most `pending` of this thread's copy groups are in flight. Stages are at most 4, so 2 is the
// largest.
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
  __device__ __forceinline__ int previous() const { return current == 0 ? count - 1 : current - 1; }
  __device__ __forceinline__ int next() const { return current + 1 < count ? current + 1 : 0; }
  __device__ __forceinline__ void advance() { current = next(); }
};

}  // namespace flashinfer::cuda
