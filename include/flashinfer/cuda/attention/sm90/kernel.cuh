// The Hopper attention kernel (FlashAttention-3, arXiv 2407.08608): persistent CTAs with warp specialisation.
//   producer warpgroup:  warp 0 loads Q and K, warp 1 loads V, warp 2 clears or transposes V, or gathers
//                        rows, warp 3 is the scheduler
//   2 or 3 consumers:    64 rows each; S = Q K^T of a tile overlaps with O += P V of the tile before
// The online softmax per tile: m' = max(m, rowmax S), P = 2^(S - m'), l = l 2^(m - m') + rowsum P. O is
// rescaled only if m' - m is large (softmax.cuh).
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

// A consumer warpgroup: one item after the other.
template <typename Variant, typename S, typename P, typename Track>
__device__ __forceinline__ void run_consumer(const P& params, const TensorMaps& maps, const Shared<S>& shared,
                                             int group, Track& profiler) {
  const typename S::WorkRing work_ring = shared.work_ring();
  const typename S::QueryRing query_ring = shared.query_ring();
  const bool first_lane = threadIdx.x % 32 == 0;
  int key_use = 0, query_use = 0;
#pragma unroll 1
  for (int use = 0;; ++use) {
    work_ring.wait_full(use);
    const Work& work = shared.work(use);
    if (work.tiles < 0) break;
    profiler.begin(Event::kItem);
    const Variant variant(params, static_cast<uint32_t>(work.batch), nullptr);
    profiler.begin(Event::kWaitQuery);
    if (work.tiles > 0) {
      query_ring.wait_full(query_use);
      prepare_queries<Variant, S>(params, variant, shared, group, query_use);
    }
    ConsumerWarpgroup<Variant, S, P> tile{
        params, shared, work, variant, group, query_use, key_use, softmax_of<S>(params, work, variant), {}, profiler};
    tile.attend(tiles_of<S>(params, work, variant, group));
    key_use = tile.use;
    if (work.tiles > 0) ++query_use;
    const WarpgroupOutput<Variant, S, P> output{params, maps, shared, work, variant, group};
    profiler.switch_to(Event::kWriteOutput);
    output.write(tile.o, tile.softmax);
    profiler.end(Event::kWriteOutput);
    profiler.end(Event::kItem);
    __syncwarp();
    if (first_lane) work_ring.release(use);
  }
  if (threadIdx.x % 128 == 0) ptx::bulk_wait<0>();
}

template <typename Variant, typename S, typename P>
__global__ void __launch_bounds__(S::kThreads, 1)
    attention_kernel(const __grid_constant__ P params, const __grid_constant__ TensorMaps maps,
                     const int heads_per_section) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw[];
  const Shared<S> shared(raw);
  if (threadIdx.x == 0) {
    shared.init(!is_gathered(params.kv) ? 1 : S::kThirdWarpRows > 0 ? 64 : 32);
    for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v, &maps.o}) ptx::tma_prefetch(map);
  }
  clear_unused_queries<S>(params, shared);
  __syncthreads();
  wait_for_inputs();
  launch_dependents();
  Profiler<P::kProfiler> profiler(params);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == S::kConsumers) {
    ptx::setmaxnreg_dec<S::kProducerRegisters>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
    if (warp == 0) {
      load_keys<S>(params, maps, shared, profiler);
    } else if (warp == 1) {
      load_values<S>(params, maps, shared);
    } else if (warp == 2) {
      if constexpr (S::kFp8) {
        transpose_all<S>(params, shared);
      } else if (is_gathered(params.kv)) {
        gather_last_rows<S>(params, shared);
      } else {
        clear_tails<S>(params, shared);
      }
    } else if (ptx::elect_one()) {
      schedule_tiles<S>(params, heads_per_section, shared);
    }
  } else {
    ptx::setmaxnreg_inc<S::kConsumerRegisters>();
    run_consumer<Variant, S>(params, maps, shared, group, profiler);
  }
  profiler.finish();
#endif
}

}  // namespace flashinfer::cuda::sm90
