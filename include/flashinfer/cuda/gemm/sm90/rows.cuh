// Mainloop for many 8-bit tokens: a warpgroup computes 64 of every 128 tokens by a strip of weights.
//
// A thread then holds two tokens, and the weights of a strip share a factor, so a step needs two products of
// factors. With 64 weights as rows it would need as many as a thread has tokens.
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

using StripSums = float[kGemmStrip / 2];  // 64 tokens with all weights of a strip

// Sum all steps with their factors, for kHalves times 128 tokens. One warpgroup adds its sums while the
// other's products run. They alternate without a barrier.
template <typename S, int kHalves>
__device__ __forceinline__ void multiply_rows(const GemmShared<S>& shared, int group, int steps, Progress& at,
                                              StripSums (&d)[kHalves]) {
  using Lines = ChunkedTile<64>;
  const Ring<S::kStages> ring = shared.ring();
  const int row = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (StripSums& half : d)
#pragma unroll
    for (float& sum : half) sum = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ++at.use) {
    const int stage = ring.stage(at.use);
    ring.wait_full(at.use);
    const uint32_t factors = factors_of_step<S>(shared, at, step);
    const float of_weights = ptx::load_shared_float(factors + S::kTokens * 4);
    const uint64_t weights = Lines::k_contiguous(shared.weights(stage));
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      StripSums part;
      const uint64_t tokens = Lines::k_contiguous(shared.tokens(stage) + (half * 2 + group) * S::kGroupBytes);
      ptx::warpgroup_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ptx::Wgmma<kGemmStrip>::template ss<S::kType, false>(part, tokens + Lines::k_contiguous_step(i),
                                                             weights + Lines::k_contiguous_step(i), i > 0);
      ptx::warpgroup_commit();
      const uint32_t of_row = factors + (half * 128 + row) * 4;
      const float of_rows[2] = {ptx::load_shared_float(of_row) * of_weights,
                                ptx::load_shared_float(of_row + 32) * of_weights};
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_hold(part);
      if (half == kHalves - 1) release_stage<S>(ring, at.use);
#pragma unroll
      for (int i = 0; i < kGemmStrip / 2; ++i) d[half][i] = fmaf(part[i], of_rows[i / 2 % 2], d[half][i]);
    }
    release_factors<S>(shared, at, step, steps);
  }
}

}  // namespace flashinfer::cuda::sm90
