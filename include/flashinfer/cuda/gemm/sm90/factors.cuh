// Scale factors of 8-bit operands: a ring of panels, each for kPanel steps of k.
//
// If the factors of a row are contiguous, a step would read four bytes of each of many lines, and an SM reads
// one line per cycle. Therefore a warp loads all steps of a panel at once.
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

__device__ __forceinline__ const float* of_lane(const float* pointer, int lane) {
  return reinterpret_cast<const float*>(
      __shfl_sync(~0u, static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(pointer)), lane));
}

// Load 32 rows of a panel. Each lane holds the start of a row's factors (null: 1) and the offset of the step
// with the lane's number modulo kPanel (-1: after the last step).
template <typename S>
__device__ __forceinline__ void load_rows_of_factors(uint32_t to, const float* begin, int64_t behind, bool along) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 2
  for (int i = 0; i < kPanel; ++i) {
    const int row = along ? i * (32 / kPanel) + lane / kPanel : lane, step = along ? lane % kPanel : i;
    const float* from = of_lane(begin, row);
    const int64_t at = __shfl_sync(~0u, behind, step);
    const uint32_t address = to + step * S::kFactorPitch + row * 4;
    if (from == nullptr) {
      ptx::store_shared(address, __float_as_uint(1.0f));
    } else if (at >= 0) {
      ptx::cp_async_4(address, from + at);
    }
  }
}

// Load the factors of all tiles, by one warp or by two. Each of two loads half of the tokens.
template <typename S>
__device__ __forceinline__ void load_factors(const GemmParams& p, const GemmShared<S>& shared,
                                             const GemmSettings& settings, uint32_t rank, int warp) {
  // If tokens are the rows of wgmma, the weights of a strip share one factor.
  constexpr int kOfTokens = S::kTokens / S::kFactorWarps / 32, kOfWeights = S::kTokensAreRows ? 0 : kGemmStrip / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, part = warp * kOfTokens * 32;
  const Ring<kPanels> ring = shared.panels();
  GemmTiles<S> tiles(p, settings);
  GemmTile tile;
  const auto steps = static_cast<int>((p.k + S::kDepth - 1) / S::kDepth);
  // Steps that share a factor.
  const int each = p.scale_depth ? static_cast<int>(p.scale_depth / S::kDepth) : steps;
  const int64_t token_stride = p.a_scale.depth_stride, weight_stride = p.b_scale.depth_stride;
  int use = 0;
  for (int32_t number = blockIdx.x / S::kCluster; tiles.find(number, tile); number += gridDim.x / S::kCluster) {
    const int64_t strip = static_cast<int64_t>(tile.strip + rank) * kGemmStrip;
    const float *tokens[kOfTokens], *weights[kOfWeights + 1];
#pragma unroll
    for (int i = 0; i < kOfTokens; ++i) {
      const int at = part + i * 32 + lane;
      const int64_t row = at < tile.rows ? source_row(p, tile.row + at) : -1;
      tokens[i] = p.a_scale.data && row >= 0 ? p.a_scale.of_row(0, row) : nullptr;
    }
#pragma unroll
    for (int i = 0; i < kOfWeights + S::kTokensAreRows; ++i) {
      const int64_t row = strip + (S::kTokensAreRows ? 0 : i * 32 + lane);
      weights[i] = p.b_scale.data && row < p.n ? p.b_scale.of_row(tile.matrix, row) : nullptr;
    }
    for (int first = 0; first < steps; first += kPanel, ++use) {
      ring.wait_empty(use);
      const uint32_t to = shared.factors(ring.stage(use));
      const int step = first + lane % kPanel, depth = step < steps ? step / each : -1;
#pragma unroll
      for (int i = 0; i < kOfTokens; ++i)
        load_rows_of_factors<S>(to + (part + i * 32) * 4, tokens[i], depth < 0 ? -1 : depth * token_stride,
                                token_stride == 1);
#pragma unroll
      for (int i = 0; i < kOfWeights; ++i)
        load_rows_of_factors<S>(to + S::kTokens * 4 + i * 128, weights[i], depth < 0 ? -1 : depth * weight_stride,
                                weight_stride == 1);
      if (S::kTokensAreRows && warp == 0 && lane < kPanel) {
        const uint32_t address = to + lane * S::kFactorPitch + S::kTokens * 4;
        if (weights[0] == nullptr) {
          ptx::store_shared(address, __float_as_uint(1.0f));
        } else if (depth >= 0) {
          ptx::cp_async_4(address, weights[0] + depth * weight_stride);
        }
      }
      ptx::mbarrier_arrive_after_cp_async(ring.full(use));
      ptx::mbarrier_arrive(ring.full(use));
    }
  }
}

}  // namespace flashinfer::cuda::sm90
