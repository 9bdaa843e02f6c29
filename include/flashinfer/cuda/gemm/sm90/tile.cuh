// A warpgroup's part of a tile: 64 weights by kN tokens, summed over the depth.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/gemm/sm90/shape.cuh>
#include <flashinfer/cuda/ptx/mbarrier.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>
#include <flashinfer/cuda/ptx/wgmma.cuh>
#include <flashinfer/cuda/tile/descriptor.cuh>

namespace flashinfer::cuda::sm90 {

// Every warp tells the loaders of both blocks: what it read may be overwritten by either.
template <typename S>
__device__ __forceinline__ void release_stage(const Ring<S::kStages>& ring, int use) {
  const uint32_t lane = threadIdx.x % 32;
  if (S::kCluster == 1) {
    if (lane == 0) ring.release(use);
  } else if (lane < S::kCluster) {
    ptx::mbarrier_arrive_of_rank(ring.empty(use), lane);
  }
}

template <typename S, int kN>
__device__ __forceinline__ void multiply_step(const GemmShared<S>& shared, int group, int use, bool add,
                                              float (&d)[kN / 2]) {
  using Lines = ChunkedTile<64>;
  const int stage = Ring<S::kStages>::stage(use);
  const uint32_t at = shared.weights(stage) + group * S::kGroupBytes;
  const uint64_t weights = S::kByDepth ? Lines::k_contiguous(at) : Lines::n_contiguous(at);
  const uint64_t tokens = Lines::k_contiguous(shared.tokens(stage));
  ptx::warpgroup_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    ptx::Wgmma<kN>::template ss<S::kType, false, !S::kByDepth>(
        d, weights + (S::kByDepth ? Lines::k_contiguous_step(i) : Lines::n_contiguous_step(i)),
        tokens + Lines::k_contiguous_step(i), add || i > 0);
  ptx::warpgroup_commit();
}

// d = sums of all steps; `use` goes on behind them.
template <typename S, int kN>
__device__ __forceinline__ void multiply(const GemmShared<S>& shared, int group, int steps, int& use,
                                         float (&d)[kN / 2]) {
  const Ring<S::kStages> ring = shared.ring();
  // Sums that the first product might read would be alive before it, beside those of all other numbers of tokens.
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) d[i] = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ++use) {
    ring.wait_full(use);
    multiply_step<S, kN>(shared, group, use, true, d);
    ptx::warpgroup_wait<1>();
    if (step > 0) release_stage<S>(ring, use - 1);
  }
  ptx::warpgroup_wait<0>();
  ptx::warpgroup_hold(d);
  release_stage<S>(ring, use - 1);
}

#ifndef FI_TURNS
#define FI_TURNS 0
#endif
#ifndef FI_PARTS
#define FI_PARTS 2
#endif

constexpr int kTurns = 3;  // the first of two named barriers

__device__ __forceinline__ void take_turn(int group) {
  if (FI_TURNS > 0) ptx::named_barrier<256>(kTurns + group);
}
__device__ __forceinline__ void pass_turn(int group) {
  if (FI_TURNS > 0) ptx::named_barrier_arrive<256>(kTurns + 1 - group);
}

// How far a warpgroup is: steps, and panels of factors.
struct Progress {
  int use, panel;
};

// The factors of a step of 8 bits.
template <typename S>
__device__ __forceinline__ uint32_t factors_of_step(const GemmShared<S>& shared, const Progress& at, int step) {
  const Ring<kPanels> panels = shared.panels();
  if (step % kPanel == 0) panels.wait_full(at.panel);
  return shared.factors(panels.stage(at.panel)) + step % kPanel * S::kFactorPitch;
}

// Behind the last read of a step's factors.
template <typename S>
__device__ __forceinline__ void release_factors(const GemmShared<S>& shared, Progress& at, int step, int steps) {
  if (step % kPanel != kPanel - 1 && step != steps - 1) return;
  __syncwarp();
  if (threadIdx.x % 32 == 0) shared.panels().release(at.panel);
  ++at.panel;
}

// The same of 8 bits. Tensor cores add up about 14 bits of each sum: those of a step are added to others in float32,
// with the factors of its tokens and weights.
template <typename S, int kN>
__device__ __forceinline__ void multiply_scaled(const GemmShared<S>& shared, int group, int steps, Progress& at,
                                                float (&d)[kN / 2]) {
  const Ring<S::kStages> ring = shared.ring();
  const int lane = static_cast<int>(threadIdx.x) % 32, row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) d[i] = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ++at.use) {
    float part[kN / 2];
    ring.wait_full(at.use);
    take_turn(group);
    multiply_step<S, kN>(shared, group, at.use, false, part);
    if (FI_TURNS == 1) pass_turn(group);
    const uint32_t factors = factors_of_step<S>(shared, at, step);
    const uint32_t weights = factors + S::kTokens * 4 + row * 4;
    const float of_weights[2] = {ptx::load_shared_float(weights), ptx::load_shared_float(weights + 32)};
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(part);
    if (FI_TURNS > 1) pass_turn(group);
    release_stage<S>(ring, at.use);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const uint2 raw = ptx::load_shared_8(factors + j * 32 + lane % 4 * 8);
      const float of_tokens[2] = {__uint_as_float(raw.x), __uint_as_float(raw.y)};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        d[4 * j + i] = fmaf(part[4 * j + i], of_tokens[i % 2] * of_weights[i / 2], d[4 * j + i]);
    }
    release_factors<S>(shared, at, step, steps);
  }
}

// ---- tokens as rows ----------------------------------------------------------------------------------------------

using StripSums = float[kGemmStrip / 2];  // of 64 tokens with all weights of a strip

template <typename S>
__device__ __forceinline__ void multiply_rows_step(const GemmShared<S>& shared, int group, int use, StripSums& part) {
  using Lines = ChunkedTile<64>;
  const int stage = Ring<S::kStages>::stage(use);
  const uint64_t tokens = Lines::k_contiguous(shared.tokens(stage) + group * S::kGroupBytes);
  const uint64_t weights = Lines::k_contiguous(shared.weights(stage));
  ptx::warpgroup_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ptx::Wgmma<kGemmStrip>::template ss<S::kType, false>(part, tokens + Lines::k_contiguous_step(i),
                                                         weights + Lines::k_contiguous_step(i), i > 0);
    if (FI_TURNS == 2 && FI_PARTS == 1 && i == 1) ptx::warpgroup_commit();
  }
  ptx::warpgroup_commit();
}

template <typename S>
__device__ __forceinline__ void add_rows(const GemmShared<S>& shared, int group, Progress& at, int step, int steps,
                                         const StripSums& part, StripSums& d) {
  const int row = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const uint32_t factors = factors_of_step<S>(shared, at, step);
  const float of_weights = ptx::load_shared_float(factors + S::kTokens * 4);
  const float of_rows[2] = {ptx::load_shared_float(factors + row * 4) * of_weights,
                            ptx::load_shared_float(factors + row * 4 + 32) * of_weights};
#pragma unroll
  for (int i = 0; i < kGemmStrip / 2; ++i) d[i] = fmaf(part[i], of_rows[i / 2 % 2], d[i]);
  release_factors<S>(shared, at, step, steps);
}

// d = sums of all steps with their factors, of which weights of a strip share one.
template <typename S>
__device__ __forceinline__ void multiply_rows(const GemmShared<S>& shared, int group, int steps, Progress& at,
                                              StripSums& d) {
  const Ring<S::kStages> ring = shared.ring();
#pragma unroll
  for (float& sum : d) sum = 0;
#if FI_PARTS == 1
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ++at.use) {
    StripSums part;
    ring.wait_full(at.use);
    take_turn(group);
    multiply_rows_step(shared, group, at.use, part);
    if (FI_TURNS == 1) pass_turn(group);
    if (FI_TURNS == 2) {
      ptx::warpgroup_wait<1>();
      pass_turn(group);
    }
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(part);
    if (FI_TURNS == 3) pass_turn(group);
    release_stage<S>(ring, at.use);
    add_rows(shared, group, at, step, steps, part, d);
  }
#else
#ifndef FI_UNROLL
#define FI_UNROLL 4
#endif
  int step = 0;
#pragma unroll 1
  for (; step + FI_UNROLL <= steps; step += FI_UNROLL) {
    StripSums part[2];
    ring.wait_full(at.use);
    take_turn(group);
    multiply_rows_step(shared, group, at.use, part[0]);
#pragma unroll
    for (int i = 0; i < FI_UNROLL; ++i) {
      if (i + 1 < FI_UNROLL) {
        ring.wait_full(at.use + 1);
        multiply_rows_step(shared, group, at.use + 1, part[(i + 1) % 2]);
        if (FI_TURNS == 1 && i + 2 == FI_UNROLL) pass_turn(group);
        ptx::warpgroup_wait<1>();
        if (FI_TURNS == 2 && i + 2 == FI_UNROLL) pass_turn(group);
      } else {
        ptx::warpgroup_wait<0>();
        if (FI_TURNS == 3) pass_turn(group);
      }
      ptx::warpgroup_hold(part[i % 2]);
      release_stage<S>(ring, at.use++);
      add_rows(shared, group, at, step + i, steps, part[i % 2], d);
    }
  }
#pragma unroll 1
  for (; step < steps; ++step) {
    StripSums part;
    ring.wait_full(at.use);
    take_turn(group);
    multiply_rows_step(shared, group, at.use, part);
    if (FI_TURNS == 1) pass_turn(group);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(part);
    if (FI_TURNS > 1) pass_turn(group);
    release_stage<S>(ring, at.use++);
    add_rows(shared, group, at, step, steps, part, d);
  }
#endif
}

}  // namespace flashinfer::cuda::sm90
