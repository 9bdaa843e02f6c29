// Grouped GEMM on Hopper: persistent clusters of two CTAs loop over tiles, whose number only the device
// knows.
#pragma once

#include <cstdint>

#include <flashinfer/common/gemm.h>
#include <flashinfer/cuda/gemm/sm90/factors.cuh>
#include <flashinfer/cuda/gemm/sm90/load.cuh>
#include <flashinfer/cuda/gemm/sm90/output.cuh>
#include <flashinfer/cuda/gemm/sm90/rows.cuh>
#include <flashinfer/cuda/gemm/sm90/shape.cuh>
#include <flashinfer/cuda/gemm/sm90/tile.cuh>
#include <flashinfer/cuda/gemm/sm90/tiles.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/ptx/cluster.cuh>

namespace flashinfer::cuda::sm90 {

// Compute a tile whose tokens are the rows of wgmma: a warpgroup owns 64 of every 128 tokens.
template <typename S, int kHalves>
__device__ __forceinline__ void compute_rows(const GemmParams& p, const GemmSettings& settings, const GemmMaps& maps,
                                             const GemmShared<S>& shared, const GemmTile& tile, int group,
                                             uint32_t rank, int steps, Progress& at) {
  StripSums d[kHalves];
  const int64_t column = static_cast<int64_t>(tile.strip + rank) * kGemmStrip;
  const GemmOutput<S> output(p, settings, maps.out, tile, group, column, shared.outputs(group));
  multiply_rows<S, kHalves>(shared, group, steps, at, d);
#pragma unroll
  for (int half = 0; half < kHalves; ++half) output.store_strip(d[half], half * 128 + group * 64);
}

template <typename S, int kN>
__device__ __forceinline__ void compute_tile(const GemmParams& p, const GemmSettings& settings, const GemmMaps& maps,
                                             const GemmShared<S>& shared, const GemmTile& tile, int group,
                                             uint32_t rank, int steps, Progress& at) {
  if constexpr (S::kTokensAreRows)
    return compute_rows<S, kN / 128>(p, settings, maps, shared, tile, group, rank, steps, at);
  float d[kN / 2];
  if constexpr (S::kFp8) {
    multiply_scaled<S, kN>(shared, group, steps, at, d);
  } else {
    multiply<S, kN>(shared, group, steps, at.use, d);
  }
  const int64_t column = static_cast<int64_t>(tile.strip + rank) * kGemmStrip + group * 64;
  const GemmOutput<S> output(p, settings, maps.out, tile, group, column, shared.outputs(group));
  if (S::kKMajor && !S::kFp8 && settings.gate != GemmGate::kNone) {
    output.template store_gated<kN>(d, column / 2);
  } else if (settings.lines) {
    output.template store_tokens_vectors<kN>(d);
  } else {
    output.template store_tokens_any<kN>(d);
  }
}

template <typename S>
__device__ __forceinline__ void compute_tiles(const GemmParams& p, const GemmSettings& settings, const GemmMaps& maps,
                                              const GemmShared<S>& shared, int group, uint32_t rank) {
  GemmTiles<S> tiles(p, settings);
  GemmTile tile;
  const auto steps = static_cast<int>((p.k + S::kDepth - 1) / S::kDepth);
  Progress at{0, 0};
#define FLASHINFER_TILE(n)                                                         \
  case n:                                                                          \
    if constexpr (n <= S::kTokens && (!S::kTokensAreRows || n % 128 == 0))         \
      compute_tile<S, n>(p, settings, maps, shared, tile, group, rank, steps, at); \
    break;
#pragma unroll 1
  for (int32_t number = blockIdx.x / S::kCluster; tiles.find(number, tile); number += gridDim.x / S::kCluster) {
    const int tokens = S::kTokensAreRows ? (tile.tokens + 127) / 128 * 128 : tile.tokens;
    switch (__shfl_sync(~0u, tokens, 0)) {
      FLASHINFER_TILE(16)
      FLASHINFER_TILE(32)
      FLASHINFER_TILE(64)
      FLASHINFER_TILE(96)
      FLASHINFER_TILE(128)
      FLASHINFER_TILE(160)
      FLASHINFER_TILE(192)
      FLASHINFER_TILE(224)
      FLASHINFER_TILE(256)
    }
  }
#undef FLASHINFER_TILE
}

template <typename S>
__global__ void __launch_bounds__(kGemmThreads, 1)
    gemm_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ GemmMaps maps,
                const GemmSettings settings) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t
      barriers[2 * (S::kStages + kPanels)];  // static shared memory marks the kernel as present for the host
  const GemmShared<S> shared{(ptx::shared_address(raw) + 1023) & ~1023u, ptx::shared_address(barriers)};
  if (threadIdx.x == 0) {
    shared.ring().init(1 + (p.a_rows ? S::kGatherThreads : 0), 8 * S::kCluster);
    shared.panels().init(64 * S::kFactorWarps, 8);
    ptx::mbarrier_fence_init();
    ptx::tma_prefetch(&maps.weights);
    for (const CUtensorMap& map : maps.tokens) ptx::tma_prefetch(&map);
    if (S::kStores && (settings.lines || settings.gate != GemmGate::kNone)) ptx::tma_prefetch(&maps.out);
  }
  ptx::cluster_sync();
  wait_for_inputs();
  launch_dependents();
  const uint32_t rank = ptx::cluster_rank();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 2) {
    ptx::setmaxnreg_dec<S::kLoadRegisters>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0) % 4;
    if (warp == 0) {
      load_tiles(p, maps, shared, settings, rank);
    } else if (S::kFp8 && warp <= S::kFactorWarps) {
      load_factors(p, shared, settings, rank, warp - 1);
    } else if (warp > 1 && p.a_rows) {
      gather_tokens(p, settings, shared);
    }
  } else {
    ptx::setmaxnreg_inc<S::kComputeRegisters>();
    compute_tiles(p, settings, maps, shared, group, rank);
    if (S::kStores && threadIdx.x % 32 == 0) ptx::bulk_wait<0>();
  }
  ptx::cluster_sync();  // the other CTA may still arrive at this CTA's barriers
#endif
}

}  // namespace flashinfer::cuda::sm90
