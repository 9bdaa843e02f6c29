// The online softmax (Milakov and Gimelshein, arXiv 1805.02867), in steps between which products run.
#pragma once

#include <cmath>
#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda::sm90 {

// Softmax of a thread's two rows: P = 2^(scale * (s - row_max)), sum = rowsum P. row_max is updated lazily:
// only if an element of P would pass 2^kSlack. O is then multiplied by `factor`. The normalised result does
// not depend on row_max. With e4m3, P is multiplied by 2^kShift to use the range 2^-9 to 448. With
// 8-bit types each row has its own scale, and `logits` is the factor of its products.
template <bool kFp8>
struct Softmax {
  static constexpr float kSlack = kFp8 ? 4 : 8, kShift = kFp8 ? 4 : 0;
  static constexpr int kScales = kFp8 ? 2 : 1;
  float scales[kScales], logits[kScales];
  float row_max[2] = {-math::inf, -math::inf}, sum[2] = {0, 0}, factor[2] = {1, 1};  // sum: of this lane's elements

  __device__ __forceinline__ float scale(int half) const { return scales[kFp8 ? half : 0]; }
  __device__ __forceinline__ float base(int half) const {
    return (row_max[half] == -math::inf ? 0.0f : row_max[half] * scale(half)) - kShift;
  }

  // Raise row_max if needed. Return true, in all lanes or in none, if O must be multiplied by `factor`.
  template <int kN>
  __device__ __forceinline__ bool update_max(const float (&s)[kN]) {
    float tile_max[2] = {-math::inf, -math::inf};
#pragma unroll
    for (int i = 0; i < kN; ++i) tile_max[i / 2 % 2] = fmaxf(tile_max[i / 2 % 2], s[i]);
    const bool higher =
        kFp8 ? fmaxf((tile_max[0] - row_max[0]) * scale(0), (tile_max[1] - row_max[1]) * scale(1)) > kSlack
             : fmaxf(tile_max[0] - row_max[0], tile_max[1] - row_max[1]) * scale(0) > kSlack;
    if (!__any_sync(kAllLanes, higher)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float old = row_max[half], now = fmaxf(old, quad_max(tile_max[half]));
      factor[half] = now == old ? 1.0f : math::ptx_exp2((old - now) * scale(half));
      row_max[half] = now, sum[half] *= factor[half];
    }
    return true;
  }

  // Replace logits by P and add to the row sums.
  template <int kN>
  __device__ __forceinline__ void exponentiate(float (&s)[kN]) {
    const float offset[2] = {base(0), base(1)};
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      s[i] = math::ptx_exp2(fmaf(s[i], scale(i / 2 % 2), -offset[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
  }

  template <int kN>
  __device__ __forceinline__ void rescale(float (&o)[kN]) const {
#pragma unroll
    for (int i = 0; i < kN; ++i) o[i] *= factor[i / 2 % 2];
  }
};

}  // namespace flashinfer::cuda::sm90
