// Multi-head latent attention on Hopper (DeepSeek-V2, arXiv 2405.04434, with the warp roles of
// FlashAttention-3, arXiv 2407.08608): the kernel and its launch. S = Q K^T over 576 columns, O = P V over
// the first 512.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <flashinfer/cuda/host/tensor_map.h>
#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/mla/merge.cuh>
#include <flashinfer/cuda/mla/sm90_gathered.cuh>
#include <flashinfer/cuda/mla/sm90_load.cuh>
#include <flashinfer/cuda/mla/sm90_tile.cuh>
#include <flashinfer/cuda/profiler.cuh>

namespace flashinfer::cuda::sm90 {

// Load queries. Runs in the 256 consumer threads.
template <typename T>
__device__ __forceinline__ void mla_load_queries(const MlaRows& rows, const MlaShared& shared) {
  const int unit = static_cast<int>(threadIdx.x) % 64, row0 = static_cast<int>(threadIdx.x) / 64;
#pragma unroll 4
  for (int i = 0; i < kMlaRows / 4; ++i) {
    const int row = row0 + 4 * i;
    const bool exists = row < rows.count;
    ptx::cp_async_16(shared.queries() + MlaChunk::unit(row, unit), rows.nope<T>(exists ? row : 0) + unit * 8, exists);
  }
  ptx::cp_async_commit();
}

template <typename T, bool kGather, typename P>
__global__ void __launch_bounds__(kMlaThreads, 1)
    mla_kernel(const __grid_constant__ P params, const __grid_constant__ MlaMaps maps, const int zero) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw[];
  const MlaShared shared(raw);
  if (threadIdx.x == 0) {
    shared.init(kGather ? 128 : 1);
    if (!kGather) ptx::tma_prefetch(&maps.ckv), ptx::tma_prefetch(&maps.kpe);
  }
  __syncthreads();
  wait_for_inputs();
  launch_dependents();
  Profiler<P::kProfiler> profiler(params);
  // Loaded before the number of items is known, because the list has room for as many items as CTAs. The
  // latencies of the two loads overlap.
  const WorkItem item = params.item(static_cast<int32_t>(blockIdx.x));
  if (static_cast<int32_t>(blockIdx.x) >= params.num_items()) return;
  const int pairs = mla_pairs(item), group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 2) {
    ptx::setmaxnreg_dec<kMlaProducerRegisters<kGather>>();
    const int32_t first_page = params.kv.indptr[item.batch];
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0) - 8;
    profiler.begin(Event::kItem);
    if constexpr (kGather) {
      MlaGatherer<T>{params, shared, item, first_page}.copy_all(pairs);
    } else if (warp == 0) {
      mla_load_all(pairs, [&](int block, int side) {
        profiler.begin(Event::kLoadKv);
        mla_load_side(params, maps, shared, item, first_page, block, side);
        profiler.end(Event::kLoadKv);
      });
    }
    profiler.end(Event::kItem);
  } else {
    ptx::setmaxnreg_inc<kMlaConsumerRegisters<kGather>>();
    const MlaRows rows(params, item);
    profiler.begin(Event::kItem);
    profiler.begin(Event::kLoadQuery);
    mla_load_queries<T>(rows, shared);
    using Track = Profiler<P::kProfiler>;
    using Left = std::conditional_t<kGather, MlaGatheredConsumer<T, 0, Track>, MlaConsumer<T, 0, false, Track>>;
    using Right = std::conditional_t<kGather, MlaGatheredConsumer<T, 1, Track>, MlaConsumer<T, 1, false, Track>>;
    if (group == 0) {
      mla_attend(Left(params, shared, item, rows, zero, profiler), pairs);
    } else {
      mla_attend(Right(params, shared, item, rows, zero, profiler), pairs);
    }
    profiler.end(Event::kWriteOutput);
    profiler.end(Event::kItem);
  }
  profiler.finish();
#endif
}

inline WorkLimits mla_limits(int device) {
  return {kMlaRows, device_info(device).num_sms, 256, 2 * kMlaKeys, 256, 256};
}

template <typename T>
CUtensorMap mla_map(const MlaParams& params, const void* data, int columns, int64_t page, int64_t row, uint32_t box) {
  return tensor_map<128, 3>(
      __is_same(T, bfloat16_t) ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
      {data,
       {static_cast<uint64_t>(columns), params.kv.page_size.divisor, static_cast<uint64_t>(params.kv.num_pages)},
       {1, row, page},
       {64, box, 1}});
}

template <typename T>
MlaMaps mla_maps(const MlaParams& params) {
  MlaMaps maps;
  std::memset(&maps, 0, sizeof(maps));
  if (mla_is_gathered(params.kv)) return maps;
  const uint32_t size = params.kv.page_size.divisor, box = size % 64 == 0 ? 64 : 32;
  const KvCache& kv = params.kv;
  maps.ckv = mla_map<T>(params, kv.k, kMlaCkv, kv.k_page, kv.k_row, box);
  maps.kpe = mla_map<T>(params, kv.v, kMlaKpe, kv.v_page, kv.v_row, box);
  maps.rows = static_cast<int32_t>(box);
  return maps;
}

template <typename T, bool kGather, typename P>
void launch_mla(const P& params, const Launch& where) {
  Kernel<mla_kernel<T, kGather, P>>::launch(dim3(static_cast<unsigned>(params.max_items)), dim3(kMlaThreads),
                                            MlaShared::kBytes, where,
                                            with_tracks(params, params.max_items, kMlaThreads), mla_maps<T>(params), 0);
  launch_mla_merges<T>(params, where);
}

template <typename T, typename P>
void mla(const P& params, const Launch& where) {
  if (mla_is_gathered(params.kv)) {
    launch_mla<T, true>(params, where);
  } else {
    launch_mla<T, false>(params, where);
  }
}

}  // namespace flashinfer::cuda::sm90
