// Softmax as keys come, in pieces between which products run.
#pragma once

#include <cmath>
#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda::sm90 {

// Two rows of a thread: sums of 2^(scale * (s - reference)). The reference of a row is raised only when a weight would
// pass 2^kSlack; outputs are then multiplied by `share`. The result is the same whatever the reference. Weights that
// become e4m3 are 2^kAbove times larger: they fill its range, which goes from 2^-9 to 448. Rows of these have scales of
// their own, and what their products are multiplied by is `logits`.
template <bool kFp8>
struct Softmax {
  static constexpr float kSlack = kFp8 ? 4 : 8, kAbove = kFp8 ? 4 : 0;
  static constexpr int kScales = kFp8 ? 2 : 1;
  float scales[kScales], logits[kScales];
  float reference[2] = {-math::inf, -math::inf}, sum[2] = {0, 0}, share[2] = {1, 1};  // sum: of this lane's elements

  __device__ __forceinline__ float scale(int half) const { return scales[kFp8 ? half : 0]; }
  __device__ __forceinline__ float base(int half) const {
    return (reference[half] == -math::inf ? 0.0f : reference[half] * scale(half)) - kAbove;
  }

  // Whether outputs are to be multiplied by `share`: the same in all lanes.
  template <int kN>
  __device__ __forceinline__ bool raise(const float (&s)[kN]) {
    float top[2] = {-math::inf, -math::inf};
#pragma unroll
    for (int i = 0; i < kN; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
    const bool higher = kFp8 ? fmaxf((top[0] - reference[0]) * scale(0), (top[1] - reference[1]) * scale(1)) > kSlack
                             : fmaxf(top[0] - reference[0], top[1] - reference[1]) * scale(0) > kSlack;
    if (!__any_sync(kAllLanes, higher)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float old = reference[half], now = fmaxf(old, quad_max(top[half]));
      share[half] = now == old ? 1.0f : math::ptx_exp2((old - now) * scale(half));
      reference[half] = now, sum[half] *= share[half];
    }
    return true;
  }

  // Logits become weights.
  template <int kN>
  __device__ __forceinline__ void weigh(float (&s)[kN]) {
    const float below[2] = {base(0), base(1)};
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      s[i] = math::ptx_exp2(fmaf(s[i], scale(i / 2 % 2), -below[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
  }

  template <int kN>
  __device__ __forceinline__ void rescale(float (&o)[kN]) const {
#pragma unroll
    for (int i = 0; i < kN; ++i) o[i] *= share[i / 2 % 2];
  }
};

}  // namespace flashinfer::cuda::sm90
