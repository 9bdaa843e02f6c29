// Schedules from tensors of lengths on CUDA, by one CTA. A thread serves a contiguous range of requests.
#pragma once

#include <cstdint>

#include <flashinfer/attention/batch_schedule.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/ptx/scan.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda {

constexpr int kScheduleThreads = 512;

struct BlockOfThreads {
  batch_schedule::Memory& memory;
  using Sums = batch_schedule::Sums;

  __device__ __forceinline__ int32_t thread() const { return static_cast<int32_t>(threadIdx.x); }
  __device__ __forceinline__ int32_t threads() const { return kScheduleThreads; }
  __device__ __forceinline__ int32_t lane() const { return thread() % 32; }
  __device__ __forceinline__ int32_t lanes() const { return 32; }
  __device__ __forceinline__ void sync() const { __syncthreads(); }

  __device__ __forceinline__ Sums before(Sums own, Sums& all) const {
    Sums ends = own;  // of this warp, up to this lane
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const Sums left{__shfl_up_sync(kAllLanes, ends.a, apart), __shfl_up_sync(kAllLanes, ends.b, apart)};
      if (lane() >= apart) ends.a += left.a, ends.b += left.b;
    }
    __syncthreads();  // other threads may still read the previous sums
    if (lane() == 31) memory.sums[thread() / 32] = ends;
    __syncthreads();
    Sums earlier{0, 0};
    all = {0, 0};
#pragma unroll
    for (int warp = 0; warp < kScheduleThreads / 32; ++warp) {
      const Sums sums = memory.sums[warp];
      if (warp < thread() / 32) earlier.a += sums.a, earlier.b += sums.b;
      all.a += sums.a, all.b += sums.b;
    }
    return {earlier.a + ends.a - own.a, earlier.b + ends.b - own.b};
  }

  __device__ __forceinline__ int32_t most(int32_t own) const {
    own = __reduce_max_sync(kAllLanes, own);
    if (lane() == 0) memory.longest[thread() / 32] = own;
    __syncthreads();
    return __reduce_max_sync(kAllLanes, lane() < kScheduleThreads / 32 ? memory.longest[lane()] : 0);
  }

  __device__ __forceinline__ int32_t sum_of_lanes(int32_t own) const { return __reduce_add_sync(kAllLanes, own); }
  __device__ __forceinline__ int32_t add(int32_t& to, int32_t number) const { return atomicAdd(&to, number); }

  __device__ __forceinline__ void end_bins() const {
    static_assert(batch_schedule::kBins == 64, "a lane has two bins");
    if (thread() < 32) {
      int32_t* const own = memory.bins + 2 * lane();
      const int32_t first = own[0], end = static_cast<int32_t>(ptx::warp_ends(first + own[1]));
      own[0] = end - own[1], own[1] = end;
    }
    __syncthreads();
  }
};

__global__ void __launch_bounds__(kScheduleThreads)
    schedule_batch_kernel(const __grid_constant__ BatchScheduleParams params) {
  __shared__ batch_schedule::Memory memory;
  wait_for_inputs();
  let_next_start();
  batch_schedule::make(params, BlockOfThreads{memory});
}

inline void schedule_batch(const BatchScheduleParams& params, const Launch& where) {
  launch(schedule_batch_kernel, dim3(1), dim3(kScheduleThreads), where, params);
}

}  // namespace flashinfer::cuda
