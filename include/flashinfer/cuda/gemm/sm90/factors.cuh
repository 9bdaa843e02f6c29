// Factors of operands of 8 bits: a ring of panels of their own, each for kPanel steps of the depth.
//
// Where factors of a row lie beside each other, a step would read four bytes of each of many lines, and an SM reads one
// line a cycle: from there a warp takes all steps of a panel at once.
#pragma once

#include <cstdint>

#include <flashinfer/common/gemm.h>
#include <flashinfer/cuda/gemm/sm90/load.cuh>
#include <flashinfer/cuda/gemm/sm90/shape.cuh>
#include <flashinfer/cuda/gemm/sm90/tiles.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/ptx/mbarrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>

namespace flashinfer::cuda::sm90 {

// 32 rows of a panel, whose factors begin at `from` of each lane; null: 1.
template <typename S>
__device__ __forceinline__ void load_rows_of_factors(uint32_t to, const float* from, int64_t stride, int first,
                                                     int steps, int each) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool along = stride == 1;
#pragma unroll 1
  for (int i = 0; i < kPanel; ++i) {
    const int row = along ? i * (32 / kPanel) + lane / kPanel : lane, step = along ? lane % kPanel : i;
    const auto* source = reinterpret_cast<const float*>(
        __shfl_sync(~0u, static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(from)), row));
    const uint32_t place = to + step * S::kFactorPitch + row * 4;
    if (source == nullptr) {
      ptx::store_shared(place, __float_as_uint(1.0f));
    } else if (first + step < steps) {
      ptx::cp_async_4(place, source + (each ? (first + step) / each : 0) * stride);
    }
  }
}

// Those of all tiles, by a warp.
template <typename S>
__device__ __forceinline__ void load_factors(const GemmParams& p, const GemmShared<S>& shared,
                                             const HopperSettings& settings, uint32_t rank) {
  constexpr int kOfLane = (S::kTokens + kGemmStrip) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Ring<kPanels> ring = shared.panels();
  HopperTiles<S::kCluster> tiles(p, settings);
  HopperTile tile;
  const auto steps = static_cast<int>((p.k + S::kDepth - 1) / S::kDepth);
  const int each = p.scale_depth ? static_cast<int>(p.scale_depth / S::kDepth) : 0;  // steps that share a factor
  int use = 0;
  for (int32_t number = blockIdx.x / S::kCluster; tiles.find(number, tile); number += gridDim.x / S::kCluster) {
    const float* from[kOfLane];
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int at = i * 32 + lane;
      if (i < S::kTokens / 32) {
        const int64_t row = at < tile.rows ? source_row(p, tile.row + at) : -1;
        from[i] = p.a_scale.data && row >= 0 ? p.a_scale.of_row(0, row) : nullptr;
      } else {
        const int64_t row = static_cast<int64_t>(tile.strip + rank) * kGemmStrip + at - S::kTokens;
        from[i] = p.b_scale.data && row < p.n ? p.b_scale.of_row(tile.matrix, row) : nullptr;
      }
    }
    for (int first = 0; first < steps; first += kPanel, ++use) {
      ring.wait_empty(use);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i)
        load_rows_of_factors<S>(shared.factors(ring.stage(use)) + i * 128, from[i],
                                i < S::kTokens / 32 ? p.a_scale.depth_stride : p.b_scale.depth_stride, first, steps,
                                each);
      ptx::mbarrier_arrive_after_cp_async(ring.full(use));
      ptx::mbarrier_arrive(ring.full(use));
    }
  }
}

}  // namespace flashinfer::cuda::sm90
