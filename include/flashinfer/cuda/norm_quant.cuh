// Norms with a quantised 8-bit result on CUDA: with one scale by the kernels of norm.cuh, and RMSNorm with a
// scale for each block of a row.
#pragma once

#include <flashinfer/common/norm_quant.h>
#include <flashinfer/cuda/norm.cuh>
#include <flashinfer/cuda/tile/quantize.cuh>

namespace flashinfer::cuda {

template <typename T>
struct RmsNormQuantOutput {
  using Params = RmsNormQuantParams;
  using Element = uint8_t;
  float rcp_scale;
  DType dtype;

  __device__ explicit RmsNormQuantOutput(const Params& p)
      : rcp_scale(static_cast<float>(p.rcp_scale())), dtype(p.output_dtype) {}
  template <int kN>
  __device__ __forceinline__ Vec<Element, kN> operator()(const float (&x)[kN], ScaleOf<T> scale,
                                                         const float (&weights)[kN]) const {
    float scaled[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) scaled[j] = x[j] * scale * weights[j] * rcp_scale;
    return quantize(scaled, dtype);
  }
};

template <typename T>
struct LayerNormQuantOutput {
  using Params = LayerNormQuantParams;
  using Element = uint8_t;
  float rcp_scale;
  DType dtype;

  __device__ explicit LayerNormQuantOutput(const Params& p)
      : rcp_scale(static_cast<float>(p.rcp_scale())), dtype(p.output_dtype) {}
  template <int kN>
  __device__ __forceinline__ Vec<Element, kN> operator()(const float (&values)[kN]) const {
    float scaled[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) scaled[j] = values[j];
    round_all<T>(scaled);
#pragma unroll
    for (int j = 0; j < kN; ++j) scaled[j] *= rcp_scale;
    return quantize(scaled, dtype);
  }
};

// Scale of a block from its largest magnitude.
__device__ __forceinline__ float block_scale(float maximum) { return fmaxf(maximum, kMinBlockMaximum) / kMaxE4M3; }

// A block is a vector of each of kLanes adjacent lanes. A row has at least that many threads, and all lanes
// of a warp take part in the shuffles.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_block_quant_kernel(const RmsNormBlockQuantParams p) {
  constexpr int kN = kVecBytes / sizeof(T), kLanes = kQuantBlock / kN;
  using V = Vec<T, kN>;
  __shared__ __align__(16) float partial[32 * 32];
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y, at = row < p.num_rows ? row : 0;
  const int num_vecs = row < p.num_rows ? p.hidden_size / kN : 0;
  const T* in = static_cast<const T*>(p.input) + at * p.input_stride;
  const T* weight = static_cast<const T*>(p.weight);
  T* res = static_cast<T*>(p.residual) + at * p.residual_stride;
  T* normed = static_cast<T*>(p.normed) + at * p.normed_stride;
  uint8_t* out = static_cast<uint8_t*>(p.output) + at * p.output_stride;

  wait_for_inputs();
  launch_dependents();
  V x[kFewVecs], r[kFewVecs];
#pragma unroll
  for (int i = 0; i < kFewVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec < num_vecs) x[i] = load_vec<T, kN>(in + vec * kN), r[i] = load_vec<T, kN>(res + vec * kN);
  }
  float sums[kFewVecs][kN];  // before rounding
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kFewVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec >= num_vecs) continue;
    float other[kN];
    x[i].to_floats(sums[i]), r[i].to_floats(other);
#pragma unroll
    for (int j = 0; j < kN; ++j) sums[i][j] += other[j], squares += sums[i][j] * sums[i][j];
    store_vec(res + vec * kN, V::from_floats(sums[i]));
  }
  const ScaleOf<T> factor = inverse_root<T>(row_sum(squares, partial), p.hidden_size, p.eps);
#pragma unroll
  for (int i = 0; i < kFewVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    float values[kN], weights[kN], maximum = 0;
    if (vec < num_vecs) {
      load_vec<T, kN>(weight + vec * kN).to_floats(weights);
#pragma unroll
      for (int j = 0; j < kN; ++j) values[j] = sums[i][j] * factor * weights[j];
      round_all<T>(values);
#pragma unroll
      for (int j = 0; j < kN; ++j) maximum = fmaxf(maximum, fabsf(values[j]));
      store_vec(normed + vec * kN, V::from_floats(values));
    }
    const float scale = block_scale(lanes_max<kLanes>(maximum));
    if (vec >= num_vecs) continue;
#pragma unroll
    for (int j = 0; j < kN; ++j) values[j] = __fdividef(values[j], scale);
    store_vec(out + vec * kN, quantize(values, DType::kFloat8E4M3));
    if (vec % kLanes == 0) p.scale[vec / kLanes * p.scale_block_stride + row * p.scale_row_stride] = scale;
  }
}

// A warp takes a block at a time, element by element.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_block_quant_any_kernel(const RmsNormBlockQuantParams p) {
  constexpr int kEach = kQuantBlock / 32;
  __shared__ __align__(16) float partial[32];
  const int64_t row = blockIdx.x;
  const T* in = static_cast<const T*>(p.input) + row * p.input_stride;
  const T* weight = static_cast<const T*>(p.weight);
  T* res = static_cast<T*>(p.residual) + row * p.residual_stride;
  T* normed = static_cast<T*>(p.normed) + row * p.normed_stride;
  uint8_t* out = static_cast<uint8_t*>(p.output) + row * p.output_stride;

  wait_for_inputs();
  launch_dependents();
  float squares = 0;
  for (int64_t i = threadIdx.x; i < p.hidden_size; i += blockDim.x) {
    const float x = to_float(in[i]) + to_float(res[i]);
    squares += x * x;
  }
  const ScaleOf<T> factor = inverse_root<T>(row_sum(squares, partial), p.hidden_size, p.eps);
  __syncthreads();  // a row of one warp: its sum has no barrier between the reads above and the writes below
  for (int64_t block = threadIdx.x / 32; block < p.hidden_size / kQuantBlock; block += blockDim.x / 32) {
    const int64_t first = block * kQuantBlock + threadIdx.x % 32;
    float values[kEach], maximum = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t i = first + j * 32;
      const float x = to_float(in[i]) + to_float(res[i]);
      const T rounded = from_float<T>(x * factor * to_float(weight[i]));
      res[i] = from_float<T>(x), normed[i] = rounded;
      values[j] = to_float(rounded), maximum = fmaxf(maximum, fabsf(values[j]));
    }
    const float scale = block_scale(lanes_max<32>(maximum));
#pragma unroll
    for (int j = 0; j < kEach; ++j) values[j] = __fdividef(values[j], scale);
    const Vec<uint8_t, kEach> result = quantize(values, DType::kFloat8E4M3);
#pragma unroll
    for (int j = 0; j < kEach; ++j) out[first + j * 32] = result.at[j];
    if (threadIdx.x % 32 == 0) p.scale[block * p.scale_block_stride + row * p.scale_row_stride] = scale;
  }
}

template <typename T>
void layer_norm_quant(const LayerNormQuantParams& p, const Launch& where) {
  layer_norm<T, LayerNormQuantOutput<T>>(p, where);
}

template <typename T>
void rms_norm_block_quant(const RmsNormBlockQuantParams& p, const Launch& where) {
  constexpr int kN = kVecBytes / sizeof(T);
  constexpr unsigned kLanes = kQuantBlock / kN;
  const int64_t num_vecs = p.hidden_size / kN;
  if (!fits_vectors<T>({p.input, p.residual, p.weight, p.normed, p.output}, p.input_stride, p.residual_stride,
                       p.normed_stride, p.output_stride) ||
      num_vecs > kMaxThreads * kFewVecs) {
    launch(rms_norm_block_quant_any_kernel<T>, dim3(p.num_rows), dim3(512), where, p);
    return;
  }
  dim3 block = row_block(num_vecs, kFewVecs);
  if (block.x < kLanes) block = dim3(kLanes, 128 / kLanes);
  launch(rms_norm_block_quant_kernel<T>, dim3((p.num_rows + block.y - 1) / block.y), block, where, p);
}

template <typename T>
void rms_norm_quant(const RmsNormQuantParams& p, const Launch& where) {
  rms_norm<T, RmsNormQuantOutput<T>>(p, where);
}

}  // namespace flashinfer::cuda
