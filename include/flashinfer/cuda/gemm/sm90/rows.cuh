// Many tokens of 8 bits: a warpgroup's part of a tile is 64 tokens by a strip of weights, summed over the depth.
//
// A thread then has numbers of two tokens, and the weights of a strip share a factor: each step takes two products of
// factors, where 64 weights by as many tokens would take as many as there are tokens of a thread.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/gemm/sm90/shape.cuh>
#include <flashinfer/cuda/gemm/sm90/tile.cuh>
#include <flashinfer/cuda/ptx/mbarrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>
#include <flashinfer/cuda/ptx/wgmma.cuh>
#include <flashinfer/cuda/tile/descriptor.cuh>

namespace flashinfer::cuda::sm90 {

using StripSums = float[kGemmStrip / 2];  // of 64 tokens with all weights of a strip

// Steps of which each is multiplied while the sums of the one before it get their factors; behind them all is waited
// for.
constexpr int kStepsTogether = 4;

template <typename S>
__device__ __forceinline__ void multiply_rows_step(const GemmShared<S>& shared, int group, int use, StripSums& part) {
  using Lines = ChunkedTile<64>;
  const int stage = Ring<S::kStages>::stage(use);
  const uint64_t tokens = Lines::k_contiguous(shared.tokens(stage) + group * S::kGroupBytes);
  const uint64_t weights = Lines::k_contiguous(shared.weights(stage));
  shared.ring().wait_full(use);
  ptx::warpgroup_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    ptx::Wgmma<kGemmStrip>::template ss<S::kType, false>(part, tokens + Lines::k_contiguous_step(i),
                                                         weights + Lines::k_contiguous_step(i), i > 0);
  ptx::warpgroup_commit();
}

// d += the sums of a step that has been waited for, with the step's factors.
template <typename S>
__device__ __forceinline__ void add_rows(const GemmShared<S>& shared, int group, Progress& at, int step, int steps,
                                         StripSums& part, StripSums& d) {
  ptx::warpgroup_hold(part);
  release_stage<S>(shared.ring(), at.use++);
  const int row = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const uint32_t factors = factors_of_step<S>(shared, at, step);
  const float of_weights = ptx::load_shared_float(factors + S::kTokens * 4);
  const float of_rows[2] = {ptx::load_shared_float(factors + row * 4) * of_weights,
                            ptx::load_shared_float(factors + row * 4 + 32) * of_weights};
#pragma unroll
  for (int i = 0; i < kGemmStrip / 2; ++i) d[i] = fmaf(part[i], of_rows[i / 2 % 2], d[i]);
  release_factors<S>(shared, at, step, steps);
}

// d = sums of all steps with their factors.
template <typename S>
__device__ __forceinline__ void multiply_rows(const GemmShared<S>& shared, int group, int steps, Progress& at,
                                              StripSums& d) {
#pragma unroll
  for (float& sum : d) sum = 0;
  int step = 0;
#pragma unroll 1
  for (; step + kStepsTogether <= steps; step += kStepsTogether) {
    StripSums part[2];
    multiply_rows_step(shared, group, at.use, part[0]);
#pragma unroll
    for (int i = 0; i < kStepsTogether; ++i) {
      if (i + 1 < kStepsTogether) {
        multiply_rows_step(shared, group, at.use + 1, part[(i + 1) % 2]);
        ptx::warpgroup_wait<1>();
      } else {
        ptx::warpgroup_wait<0>();
      }
      add_rows(shared, group, at, step + i, steps, part[i % 2], d);
    }
  }
#pragma unroll 1
  for (; step < steps; ++step) {
    StripSums part;
    multiply_rows_step(shared, group, at.use, part);
    ptx::warpgroup_wait<0>();
    add_rows(shared, group, at, step, steps, part, d);
  }
}

}  // namespace flashinfer::cuda::sm90
