// The Hopper attention kernel: blocks that stay, a warpgroup that loads and two or three that compute.
#pragma once

#include <cstdint>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/sm90/load.cuh>
#include <flashinfer/cuda/attention/sm90/output.cuh>
#include <flashinfer/cuda/attention/sm90/queries.cuh>
#include <flashinfer/cuda/attention/sm90/shape.cuh>
#include <flashinfer/cuda/attention/sm90/tile.cuh>
#include <flashinfer/cuda/attention/sm90/transpose.cuh>
#include <flashinfer/cuda/attention/sm90/work.cuh>
#include <flashinfer/cuda/host/launch.cuh>

namespace flashinfer::cuda::sm90 {

// A warpgroup that computes: one item after the other.
template <typename Variant, typename S, typename P, typename Track>
__device__ __forceinline__ void compute_all(const P& params, const Maps& maps, const Shared<S>& shared, int group,
                                            Track& profiler) {
  const typename S::WorkRing works = shared.work_ring();
  const typename S::QueryRing query_ring = shared.query_ring();
  const bool first_lane = threadIdx.x % 32 == 0;
  int key_use = 0, query_use = 0;
#pragma unroll 1
  for (int use = 0;; ++use) {
    works.wait_full(use);
    const Work& work = shared.work(use);
    if (work.tiles < 0) break;
    profiler.begin(Event::kItem);
    const Variant variant(params, static_cast<uint32_t>(work.batch), nullptr);
    profiler.begin(Event::kWaitQuery);
    if (work.tiles > 0) {
      query_ring.wait_full(query_use);
      prepare_queries<Variant, S>(params, variant, shared, group, query_use);
    }
    GroupTile<Variant, S, P> tile{
        params, shared, work, variant, group, query_use, key_use, softmax_of<S>(params, work, variant), {}, profiler};
    tile.attend(tiles_of<S>(params, work, variant, group));
    key_use = tile.use;
    if (work.tiles > 0) ++query_use;
    const GroupOutput<Variant, S, P> output{params, maps, shared, work, variant, group};
    profiler.turn(Event::kWriteOutput);
    output.write(tile.o, tile.softmax);
    profiler.end(Event::kWriteOutput);
    profiler.end(Event::kItem);
    __syncwarp();
    if (first_lane) works.release(use);
  }
  if (threadIdx.x % 128 == 0) ptx::bulk_wait<0>();
}

template <typename Variant, typename S, typename P>
__global__ void __launch_bounds__(S::kThreads, 1)
    attention_kernel(const __grid_constant__ P params, const __grid_constant__ Maps maps, const int heads_together) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw[];
  const Shared<S> shared(raw);
  if (threadIdx.x == 0) {
    shared.init(!is_gathered(params.kv) ? 1 : S::kHelpedRows > 0 ? 64 : 32);
    for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v, &maps.o}) ptx::tma_prefetch(map);
  }
  clear_unused_queries<S>(params, shared);
  __syncthreads();
  wait_for_inputs();
  let_next_start();
  Profiler<P::kProfiler> profiler(params);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == S::kGroups) {
    ptx::setmaxnreg_dec<S::kLoadRegisters>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
    if (warp == 0) {
      load_keys<S>(params, maps, shared, profiler);
    } else if (warp == 1) {
      load_values<S>(params, maps, shared);
    } else if (warp == 2) {
      if constexpr (S::kFp8) {
        transpose_all<S>(params, shared);
      } else if (is_gathered(params.kv)) {
        help_gather<S>(params, shared);
      } else {
        clear_all<S>(params, shared);
      }
    } else if (ptx::elect_one()) {
      hand_out_work<S>(params, heads_together, shared);
    }
  } else {
    ptx::setmaxnreg_inc<S::kComputeRegisters>();
    compute_all<Variant, S>(params, maps, shared, group, profiler);
  }
  profiler.finish();
#endif
}

}  // namespace flashinfer::cuda::sm90
