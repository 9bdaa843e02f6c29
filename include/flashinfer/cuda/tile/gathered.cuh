// Tiles in shared memory that threads copy row by row, for tensor cores to read. Whoever copied makes them visible, so
// that no wait for it is among the products.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/ptx/mbarrier.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>

namespace flashinfer::cuda {

// What a thread has copied last and not yet handed on. Its copies stay under way while the next ones are started, but
// not while there is no place for these: those who make place may wait for them.
struct Gathered {
  uint32_t barriers = 0;  // the full ones, behind each other
  int count = 0;          // 0: nothing is under way

  // Until a place is empty; all lanes of a warp.
  __device__ __forceinline__ void wait_empty(uint32_t barrier, uint32_t parity) {
    if (count > 0 && !__all_sync(~0u, ptx::mbarrier_test_wait(barrier, parity))) finish();
    ptx::mbarrier_wait(barrier, parity);
  }
  // Behind the copies of a tile, which fills `count_` barriers.
  __device__ __forceinline__ void started(uint32_t barriers_, int count_ = 1) {
    ptx::cp_async_commit();
    hand_on<1>();
    barriers = barriers_, count = count_;
  }
  __device__ __forceinline__ void finish() {
    hand_on<0>();
    count = 0;
  }

 private:
  template <int kPending>
  __device__ __forceinline__ void hand_on() const {
    if (count == 0) return;
    ptx::cp_async_wait<kPending>();
    ptx::fence_proxy_async();
    for (int i = 0; i < count; ++i) ptx::mbarrier_arrive(barriers + 8 * i);
  }
};

}  // namespace flashinfer::cuda
