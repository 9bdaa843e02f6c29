// RMSNorm over all heads and rotary embeddings of three axes on CUDA. A CTA has q, k or v of a token. It
// reads them twice, the second time from the L1 cache.
#pragma once

#include <cstdint>

#include <flashinfer/common/diffusion_ops.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/quantize.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda {

constexpr int kDiffusionThreads = 256;

template <typename T>
struct QkNormRopeRow {
  static constexpr int kN = kVecBytes / sizeof(T);
  const QkNormRopeParams& p;
  const T *in, *weights;
  int64_t out;  // index of the row's first output
  int part;
  float factor;

  __device__ __forceinline__ void load(int64_t column, float (&y)[kN]) const {
    load_vec<T, kN>(in + column).to_floats(y);
    if (part == 2 || !p.normalises) return;
    float w[kN];
    load_vec<T, kN>(weights + column).to_floats(w);
#pragma unroll
    for (int j = 0; j < kN; ++j) y[j] *= factor * w[j];
  }

  __device__ __forceinline__ void store(int64_t column, float (&y)[kN]) const {
    if (!p.eight_bits) return store_vec(static_cast<T*>(p.outputs[part]) + out + column, Vec<T, kN>::from_floats(y));
#pragma unroll
    for (int j = 0; j < kN; ++j) y[j] *= p.scales[part];
    store_vec(static_cast<uint8_t*>(p.outputs[part]) + out + column, quantize(y, DType::kFloat8E4M3));
  }
};

template <typename T>
__global__ void __launch_bounds__(kDiffusionThreads) qk_norm_rope_kernel(const __grid_constant__ QkNormRopeParams p) {
  constexpr int kN = kVecBytes / sizeof(T);
  __shared__ __align__(16) float partial[32];
  __shared__ float2 turns[kMaxAxisPairs];  // cosine and sine of each pair
  const int64_t token = blockIdx.x;
  const int part = blockIdx.y, half = static_cast<int>(p.head_dim) / 2;
  const auto n = static_cast<int>(p.heads[part] * p.head_dim);
  wait_for_inputs();
  launch_dependents();
  QkNormRopeRow<T> row{p,
                       static_cast<const T*>(p.input) + token * p.input_stride + p.first_column(part),
                       part < 2 ? static_cast<const T*>(p.weights[part]) : nullptr,
                       token * p.output_strides[part],
                       part,
                       1.f};
  if (part < 2 && static_cast<int>(threadIdx.x) < half) {
    float2 turn;
    sincosf(p.angle(token, threadIdx.x), &turn.y, &turn.x);
    turns[threadIdx.x] = turn;
  }
  if (part < 2 && p.normalises) {
    float squares = 0;
    for (int column = threadIdx.x * kN; column < n; column += kDiffusionThreads * kN) {
      float x[kN];
      load_vec<T, kN>(row.in + column).to_floats(x);
#pragma unroll
      for (int j = 0; j < kN; ++j) squares += x[j] * x[j];
    }
    row.factor = 1.f / sqrtf(row_sum(squares, partial) / static_cast<float>(n) + p.eps);
  }
  __syncthreads();
  if (part == 2) {
    for (int column = threadIdx.x * kN; column < n; column += kDiffusionThreads * kN) {
      float y[kN];
      row.load(column, y), row.store(column, y);
    }
  } else if (p.interleave) {
    for (int column = threadIdx.x * kN; column < n; column += kDiffusionThreads * kN) {
      float y[kN];
      row.load(column, y);
      const int pair = column % (2 * half) / 2;
#pragma unroll
      for (int j = 0; j < kN; j += 2) {
        const float a = y[j], b = y[j + 1];
        const float2 turn = turns[pair + j / 2];
        y[j] = a * turn.x - b * turn.y, y[j + 1] = b * turn.x + a * turn.y;
      }
      row.store(column, y);
    }
  } else {
    for (int i = threadIdx.x * kN; i < n / 2; i += kDiffusionThreads * kN) {
      const int pair = i % half, column = i / half * 2 * half + pair;
      float a[kN], b[kN];
      row.load(column, a), row.load(column + half, b);
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const float first = a[j], second = b[j];
        const float2 turn = turns[pair + j];
        a[j] = first * turn.x - second * turn.y, b[j] = second * turn.x + first * turn.y;
      }
      row.store(column, a), row.store(column + half, b);
    }
  }
}

template <typename T>
void qk_norm_rope(const QkNormRopeParams& p, const Launch& where) {
  launch(qk_norm_rope_kernel<T>, dim3(static_cast<unsigned>(p.num_tokens), 3), dim3(kDiffusionThreads), where, p);
}

}  // namespace flashinfer::cuda
