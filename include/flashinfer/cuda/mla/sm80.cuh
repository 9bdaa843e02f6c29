// Multi-head latent attention by mma.sync: the kernel and its launch.
#pragma once

#include <cstdint>

#include <flashinfer/attention/mla.h>
#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/mla/merge.cuh>
#include <flashinfer/cuda/mla/sm80_tile.cuh>
#include <flashinfer/cuda/profiler.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>

namespace flashinfer::cuda::sm80 {

template <typename T, typename S, typename P>
__global__ void __launch_bounds__(S::kThreads, 1) mla_kernel(const __grid_constant__ P params) {
  extern __shared__ __align__(128) uint8_t memory[];
  wait_for_inputs();
  launch_dependents();
  Profiler<P::kProfiler> profiler(params);
  if (static_cast<int32_t>(blockIdx.x) >= params.num_items()) return;
  const WorkItem item = params.item(static_cast<int32_t>(blockIdx.x));
  const MlaTile<T, S, P::kProfiler> tile{params,
                                         item,
                                         MlaRows(params, item),
                                         ptx::shared_address(memory),
                                         *reinterpret_cast<MlaState<S>*>(memory + S::kStateAt),
                                         static_cast<int>(threadIdx.x) / 32,
                                         static_cast<int>(threadIdx.x) % 32,
                                         params.kv.indptr[item.batch],
                                         profiler};
  profiler.begin(Event::kItem);
  tile.attend();
  profiler.end(Event::kItem);
  profiler.finish();
}

// Tiles by the smem of a GPU: 64 rows and 64 keys if they fit, otherwise 64 rows and 32 keys, otherwise 32
// rows.
template <typename KV, bool kScaled = false>
using MlaWide = MlaShape<64, 64, 2, KV, kScaled>;
template <typename KV, bool kScaled = false>
using MlaMiddle = MlaShape<64, 32, 2, KV, kScaled>;
template <typename KV, bool kScaled = false>
using MlaNarrow = MlaShape<32, 32, 1, KV, kScaled>;

inline WorkLimits mla_limits(int device) {
  const DeviceInfo& info = device_info(device);
  return {info.shared_bytes >= MlaMiddle<half_t>::kSharedBytes ? 64 : 32,
          info.num_sms,
          256,
          MlaWide<half_t>::kKeys,
          256,
          256};
}

template <typename T, typename S, typename P>
void launch_mla(const P& params, const Launch& where) {
  Kernel<mla_kernel<T, S, P>>::launch(dim3(static_cast<unsigned>(params.max_items)), dim3(S::kThreads), S::kSharedBytes,
                                      where, with_tracks(params, params.max_items, S::kThreads));
  launch_mla_merges<T>(params, where);
}

// kScaled: 8-bit latents have scales, params.ckv_scales.
template <typename T, typename KV, bool kScaled = false, typename P>
void mla(const P& params, const Launch& where) {
  if (params.tile_rows != 64) {
    launch_mla<T, MlaNarrow<KV, kScaled>>(params, where);
  } else if (device_info(where.device).shared_bytes < MlaWide<KV, kScaled>::kSharedBytes) {
    launch_mla<T, MlaMiddle<KV, kScaled>>(params, where);
  } else {
    launch_mla<T, MlaWide<KV, kScaled>>(params, where);
  }
}

}  // namespace flashinfer::cuda::sm80
