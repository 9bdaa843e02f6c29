// Mainloop of a warpgroup: 64 weights by kN tokens, summed over k.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/gemm/sm90/shape.cuh>
#include <flashinfer/cuda/ptx/mbarrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>
#include <flashinfer/cuda/ptx/wgmma.cuh>
#include <flashinfer/cuda/tile/descriptor.cuh>

namespace flashinfer::cuda::sm90 {

// Every warp releases the stage at both CTAs, because either may overwrite what it read.
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
  const uint64_t weights = S::kKMajor ? Lines::k_contiguous(at) : Lines::n_contiguous(at);
  const uint64_t tokens = Lines::k_contiguous(shared.tokens(stage));
  ptx::warpgroup_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    ptx::Wgmma<kN>::template ss<S::kType, false, !S::kKMajor>(
        d, weights + (S::kKMajor ? Lines::k_contiguous_step(i) : Lines::n_contiguous_step(i)),
        tokens + Lines::k_contiguous_step(i), add || i > 0);
  ptx::warpgroup_commit();
}

// d = sum over all steps. `use` counts on.
template <typename S, int kN>
__device__ __forceinline__ void multiply(const GemmShared<S>& shared, int group, int steps, int& use,
                                         float (&d)[kN / 2]) {
  const Ring<S::kStages> ring = shared.ring();
  // Otherwise sums that the first product might read would be live before it, next to those for every other
  // kN.
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

// Progress of a warpgroup: steps, and panels of factors.
struct Progress {
  int use, panel;
};

// Factors of an 8-bit step.
template <typename S>
__device__ __forceinline__ uint32_t factors_of_step(const GemmShared<S>& shared, const Progress& at, int step) {
  const Ring<kPanels> panels = shared.panels();
  if (step % kPanel == 0) panels.wait_full(at.panel);
  return shared.factors(panels.stage(at.panel)) + step % kPanel * S::kFactorPitch;
}

// Release the factors after a step's last read of them.
template <typename S>
__device__ __forceinline__ void release_factors(const GemmShared<S>& shared, Progress& at, int step, int steps) {
  if (step % kPanel != kPanel - 1 && step != steps - 1) return;
  __syncwarp();
  if (threadIdx.x % 32 == 0) shared.panels().release(at.panel);
  ++at.panel;
}

// 8-bit variant. Tensor cores add with about 14 bits. Therefore each step's sums are added to others in
// float32, with the factors of its tokens and weights.
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
    multiply_step<S, kN>(shared, group, at.use, false, part);
    const uint32_t factors = factors_of_step<S>(shared, at, step);
    const uint32_t weights = factors + S::kTokens * 4 + row * 4;
    const float of_weights[2] = {ptx::load_shared_float(weights), ptx::load_shared_float(weights + 32)};
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(part);
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

}  // namespace flashinfer::cuda::sm90
