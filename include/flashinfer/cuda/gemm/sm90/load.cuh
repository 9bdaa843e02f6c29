// Producer warps: boxes of weights and tokens by TMA, gathered tokens by cp.async, and scale factors.
#pragma once

#include <cuda.h>

#include <cstdint>

#include <flashinfer/common/gemm.h>
#include <flashinfer/cuda/gemm/sm90/shape.cuh>
#include <flashinfer/cuda/gemm/sm90/tiles.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/ptx/tma.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>

namespace flashinfer::cuda::sm90 {

struct GemmMaps {
  CUtensorMap weights, tokens[3];  // boxes of kGemmBox rows, of half and of a quarter of them
  CUtensorMap out;                 // box of kStoreRows rows, if whole lines are stored
};

// Load by TMA. Each CTA loads half of a tile's tokens for both, except 16 tokens, which are too few to halve.
// With a gate it alternates eight rows of each half of the weights, so that a thread holds a row and its
// gate.
template <typename S>
__device__ __forceinline__ void load_step(const GemmMaps& maps, const GemmShared<S>& shared, const GemmTile& tile,
                                          int use, int k, uint32_t rank, bool gathers, bool gated) {
  const Ring<S::kStages> ring = shared.ring();
  const int stage = ring.stage(use);
  const uint32_t full = ring.full(use);
  ring.wait_empty(use);
  ptx::mbarrier_arrive_expect_tx(full, S::kWeightBytes + (gathers ? 0 : tile.tokens * 128));
  const int column = (tile.strip + static_cast<int>(rank)) * kGemmStrip;
  if (S::kKMajor && !S::kFp8 && gated) {
    ptx::tma_load(shared.weights(stage), &maps.weights, full, k, 0, 0, column / 16, tile.matrix);
  } else if constexpr (S::kKMajor) {
    ptx::tma_load(shared.weights(stage), &maps.weights, full, k, column, tile.matrix);
  } else {
    ptx::tma_load(shared.weights(stage), &maps.weights, full, column, k, tile.matrix);
    ptx::tma_load(shared.weights(stage) + S::kGroupBytes, &maps.weights, full, column + 64, k, tile.matrix);
  }
  if (gathers) return;
  const bool shares = S::kCluster > 1 && tile.tokens > 16;
  int rows = shares ? tile.tokens / 2 : tile.tokens, at = shares ? static_cast<int>(rank) * rows : 0;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int box = kGemmBox >> i;
#pragma unroll 1
    for (; rows >= box; rows -= box, at += box)
      if constexpr (S::kCluster > 1) {
        ptx::tma_load_multicast(shared.tokens(stage) + at * 128, &maps.tokens[i], full, k, tile.row + at, 0,
                                shares ? 3 : 1 << rank);
      } else {
        ptx::tma_load(shared.tokens(stage) + at * 128, &maps.tokens[i], full, k, tile.row + at, 0);
      }
  }
}

template <typename S>
__device__ __forceinline__ void load_tiles(const GemmParams& p, const GemmMaps& maps, const GemmShared<S>& shared,
                                           const GemmSettings& settings, uint32_t rank) {
  GemmTiles<S> tiles(p, settings);
  GemmTile tile;
  const auto depth = static_cast<int32_t>(p.k);
  const bool leads = ptx::elect_one();
  int use = 0;
  for (int32_t number = blockIdx.x / S::kCluster; tiles.find(number, tile); number += gridDim.x / S::kCluster) {
    if (leads)
      for (int k = 0; k < depth; k += S::kDepth, ++use)
        load_step(maps, shared, tile, use, k, rank, p.a_rows != nullptr, settings.gate != GemmGate::kNone);
    __syncwarp();
  }
}

// Return the row of a for an output row; -1 counts as zeros.
__device__ __forceinline__ int64_t source_row(const GemmParams& p, int64_t row) {
  if (!p.a_rows) return row;
  const int32_t from = p.a_rows[row];
  return from < p.a_num_rows ? from : -1;
}

// Gather tokens 16 bytes at a time, by the otherwise idle warps of the third warpgroup. The thread that
// copied makes the data visible to wgmma after it has arrived, a few steps later.
template <typename S>
__device__ __forceinline__ void gather_tokens(const GemmParams& p, const GemmSettings& settings,
                                              const GemmShared<S>& shared) {
  using T = typename S::T;
  constexpr int kLag = S::kStages - 2, kUnit = 16 / sizeof(T), kRows = S::kTokens / 8;  // rows per thread
  static_assert(S::kGatherThreads == 64, "eight rows at a time, which the pattern of the swizzle repeats for");
  const Ring<S::kStages> ring = shared.ring();
  const int thread = static_cast<int>(threadIdx.x) % 64, unit = thread % 8, first = thread / 8;
  const auto depth = static_cast<int32_t>(p.k);
  GemmTiles<S> tiles(p, settings);
  GemmTile tile;
  int use = 0;
  for (int32_t number = blockIdx.x / S::kCluster; tiles.find(number, tile); number += gridDim.x / S::kCluster) {
    // Computed once, in units. After a copy, which may write any memory, the compiler would reload a row's
    // index and wait for it.
    uint32_t from[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t source = i * 8 + first < tile.rows ? source_row(p, tile.row + i * 8 + first) : -1;
      from[i] = source < 0 ? ~0u : static_cast<uint32_t>(source * settings.a_stride / kUnit) + unit;
    }
    for (int k = 0; k < depth; k += S::kDepth, ++use) {
      ring.wait_empty(use);
      const uint32_t to = shared.tokens(ring.stage(use)) + ChunkedTile<8>::unit(first, unit);
      const bool there = k + unit * kUnit < depth;
      const auto* start = static_cast<const uint4*>(p.a) + k / kUnit;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i * 8 >= tile.rows) break;
        const bool loads = there && from[i] != ~0u;
        ptx::cp_async_16(to + i * 1024, start + (loads ? from[i] : 0), loads);
      }
      ptx::cp_async_commit();
      if (use >= kLag) {
        ptx::cp_async_wait<kLag>();
        ptx::fence_proxy_async();
        ring.arrive_full(use - kLag);
      }
    }
  }
  ptx::cp_async_wait<0>();
  ptx::fence_proxy_async();
  for (int left = use > kLag ? use - kLag : 0; left < use; ++left) ring.arrive_full(left);
}

}  // namespace flashinfer::cuda::sm90
