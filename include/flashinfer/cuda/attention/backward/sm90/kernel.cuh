// The Hopper kernel of attention's gradients: persistent CTAs with a producer warpgroup and two consumers.
//
//   P = 2^(Q K^T - lse),   dV += P^T dO,   dS = P * (dO V^T - delta),   dK += dS^T Q,   dQ += dS K
// The formulas come from FlashAttention-2 (arXiv 2307.08691), the warp roles from FlashAttention-3
// (arXiv 2407.08608). A pair of tiles needs five products: 10 * 64 * 128 * 128 FLOPs at head_dim 128, 2,560
// cycles of the tensor cores. dK and dV stay in registers. dQ is a sum over tiles of keys in different CTAs.
// Each CTA adds its part, 32 KB, to floats in L2 in the order of keys, so that every run has equal bits.
//
// The alternative, a second kernel with a CTA per tile of queries, needs seven products, 1.4 times the FLOPs.
// Separate partial sums for each tile of keys would take 4 bytes per query, column and tile: 16 GB at 16,384
// tokens of 16 heads.
//
// Only the warp that adds dQ waits for other CTAs, and only for lower-numbered tiles of keys. The
// lowest-numbered unfinished tile never waits, so there is no deadlock.
#pragma once

#include <cstdint>

#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cuda/attention/backward/rows.cuh>
#include <flashinfer/cuda/attention/backward/sm90/load.cuh>
#include <flashinfer/cuda/attention/backward/sm90/shape.cuh>
#include <flashinfer/cuda/attention/backward/sm90/tile.cuh>
#include <flashinfer/cuda/attention/backward/sm90/work.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>
#include <flashinfer/cuda/tile/convert.cuh>

namespace flashinfer::cuda::sm90 {

// Write a warpgroup's sums as 64 rows of a gradient. T is float if several CTAs share a tile.
template <typename T, int kColumns>
__device__ __forceinline__ void write_rows(const HeadRows& to, int64_t token, int32_t head, int32_t rows,
                                           const float (&sums)[kColumns / 2], float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half;
    if (row >= rows) continue;
    T* at = to.at<T>(token + row, head) + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float a = sums[4 * n + 2 * half] * scale, b = sums[4 * n + 2 * half + 1] * scale;
      if constexpr (sizeof(T) == 4) {
        *reinterpret_cast<float2*>(at + 8 * n) = float2{a, b};
      } else {
        *reinterpret_cast<uint32_t*>(at + 8 * n) = pack<T>(a, b);
      }
    }
  }
}

template <typename S>
__device__ __forceinline__ void write_key_gradients(const PrefillBackwardParams& p, const BackwardTile<S>& tile) {
  using T = typename S::T;
  const BackwardWork& work = tile.work;
  const int32_t row = work.tile * S::kKeys + 64 * tile.group, rows = work.kv_len - row;
  const int64_t token = int64_t{work.kv_start} + row;
  if (p.splits == 1) {
    write_rows<T, S::kDim>(p.dk, token, work.kv_head, rows, tile.dk, p.sm_scale);
    write_rows<T, S::kDim>(p.dv, token, work.kv_head, rows, tile.dv, 1.0f);
  } else {
    HeadRows to = sums_of(p, work.part);
    write_rows<float, S::kDim>(to, token, work.kv_head, rows, tile.dk, p.sm_scale);
    to.data = static_cast<float*>(to.data) + S::kDim;
    write_rows<float, S::kDim>(to, token, work.kv_head, rows, tile.dv, 1.0f);
  }
}

template <typename S>
__device__ __forceinline__ void compute_gradients(const PrefillBackwardParams& p, const BackwardShared<S>& shared,
                                                  int group) {
  const typename S::WorkRing work_ring = shared.work_ring();
  BackwardUses uses;
#pragma unroll 1
  for (;; ++uses.work) {
    work_ring.wait_full(uses.work);
    const BackwardWork& work = shared.work(uses.work);
    if (work.steps < 0) return;
    BackwardTile<S> tile{p, shared, work, group, uses};
    tile.run();
    write_key_gradients<S>(p, tile);
    __syncwarp();
    if (threadIdx.x % 32 == 0) work_ring.release(uses.work);
  }
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    backward_kernel(const __grid_constant__ PrefillBackwardParams p, const __grid_constant__ BackwardTable table,
                    const __grid_constant__ BackwardMaps maps, const __grid_constant__ BackwardMemory memory) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw[];
  __shared__ BackwardBarriers<S> static_memory;
  const BackwardShared<S> shared(raw, static_memory);
  if (threadIdx.x == 0) {
    shared.init();
    for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v, &maps.grad}) ptx::tma_prefetch(map);
  }
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == S::kConsumers) {
    ptx::setmaxnreg_dec<S::kProducerRegisters>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
    if (warp == 0) {
      if (ptx::elect_one()) BackwardLoad<S>{p, table, maps, memory, shared}.run();
    } else if (warp == 1) {
      if (ptx::elect_one()) add_sums<S>(memory, shared);
    }
  } else {
    ptx::setmaxnreg_inc<S::kConsumerRegisters>();
    compute_gradients<S>(p, shared, group);
  }
#endif
}

}  // namespace flashinfer::cuda::sm90
