// Schedules from tensors of lengths on CUDA, by one CTA. A thread serves a contiguous range of requests, or a
// part of one request.
#pragma once

#include <cstdint>

#include <flashinfer/attention/batch_schedule.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/ptx/scan.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda {

constexpr int kScheduleThreads = batch_schedule::kMaxThreads, kScheduleWarps = kScheduleThreads / 32;
constexpr int kScheduleLanes = kScheduleThreads / batch_schedule::kCandidates, kLogScheduleThreads = 8;
static_assert(kScheduleThreads == 1 << kLogScheduleThreads && kScheduleLanes == 16);

struct BlockOfThreads {
  batch_schedule::Memory& memory;
  using Sums = batch_schedule::Sums;

  __device__ __forceinline__ int32_t thread() const { return static_cast<int32_t>(threadIdx.x); }
  __device__ __forceinline__ int32_t threads() const { return kScheduleThreads; }
  __device__ __forceinline__ int32_t log_threads() const { return kLogScheduleThreads; }
  // As many groups of lanes as kCandidates.
  __device__ __forceinline__ int32_t lane() const { return thread() % kScheduleLanes; }
  __device__ __forceinline__ int32_t lanes() const { return kScheduleLanes; }
  __device__ __forceinline__ void sync() const { __syncthreads(); }

  __device__ __forceinline__ Sums before(int32_t number, Sums own, Sums& all) const {
    const int lane = thread() % 32;
    Sums ends = own;  // of this warp, up to this lane
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const Sums left{__shfl_up_sync(kAllLanes, ends.a, apart), __shfl_up_sync(kAllLanes, ends.b, apart)};
      if (lane >= apart) ends.a += left.a, ends.b += left.b;
    }
    Sums* const of_warps = memory.sums[number];
    if (lane == 31) of_warps[thread() / 32] = ends;
    __syncthreads();
    Sums earlier{0, 0};
    all = {0, 0};
#pragma unroll
    for (int warp = 0; warp < kScheduleWarps; ++warp) {
      if (warp == thread() / 32) earlier = all;
      all.a += of_warps[warp].a, all.b += of_warps[warp].b;
    }
    return {earlier.a + ends.a - own.a, earlier.b + ends.b - own.b};
  }

  __device__ __forceinline__ void put_length(int32_t own) const {
    own = __reduce_max_sync(kAllLanes, own);
    if (thread() % 32 == 0) memory.longest[thread() / 32] = own;
  }
  __device__ __forceinline__ int32_t longest() const {
    const int lane = thread() % 32;
    return __reduce_max_sync(kAllLanes, lane < kScheduleWarps ? memory.longest[lane] : 0);
  }

  __device__ __forceinline__ int32_t sum_of_lanes(int32_t own) const {
#pragma unroll
    for (int apart = kScheduleLanes / 2; apart > 0; apart /= 2) own += __shfl_xor_sync(kAllLanes, own, apart);
    return own;
  }
  __device__ __forceinline__ int32_t add(int32_t& to, int32_t number) const { return atomicAdd(&to, number); }

  __device__ __forceinline__ int32_t first_at_most(const int32_t* numbers, int32_t bound) const {
    static_assert(batch_schedule::kCandidates < 32, "a lane has one number");
    const int lane = thread() % 32;
    const bool found = lane >= batch_schedule::kCandidates || numbers[lane] <= bound;
    return __ffs(static_cast<int>(__ballot_sync(kAllLanes, found))) - 1;
  }

  __device__ __forceinline__ void end_bins() const {
    static_assert(batch_schedule::kBins == 64, "a lane has two bins");
    if (thread() < 32) {
      int32_t* const own = memory.bins + 2 * thread();
      const int32_t first = own[0], end = static_cast<int32_t>(ptx::warp_inclusive_sum(first + own[1]));
      own[0] = end - own[1], own[1] = end;
    }
    __syncthreads();
  }
};

template <bool kInRegisters>
__global__ void __launch_bounds__(kScheduleThreads)
    schedule_batch_kernel(const __grid_constant__ BatchScheduleParams params) {
  __shared__ batch_schedule::Memory memory;
  launch_dependents();  // before the wait: the attention kernel's launch then ends during the kernels before this one
  wait_for_inputs();
  batch_schedule::make_lists<kInRegisters>(params, BlockOfThreads{memory});
}

inline void schedule_batch(const BatchScheduleParams& params, const Launch& where) {
  const bool in_registers = batch_schedule::fits_registers(params, kScheduleThreads);
  launch(in_registers ? schedule_batch_kernel<true> : schedule_batch_kernel<false>, dim3(1), dim3(kScheduleThreads),
         where, params);
}

}  // namespace flashinfer::cuda
