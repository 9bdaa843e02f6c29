// RMSNorm and LayerNorm on CUDA; equations in common/norm.h. A group of threads of one CTA holds a row in
// registers between the sum and the result, so memory is read and written once. Rows that are too long or
// unaligned are read twice by a whole CTA, element by element.
#pragma once

#include <initializer_list>
#include <type_traits>

#include <flashinfer/common/invariance.h>
#include <flashinfer/common/norm.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kVecsPerThread = 4;  // independent 16-byte loads of each thread in flight
constexpr int kFewVecs = 2;        // if rows do not fill the GPU
constexpr int kMaxThreads = 1024;

// Type of the scaling: a rounding in float could cost a float32 result one ulp.
template <typename T>
using ScaleOf = std::conditional_t<std::is_same_v<T, float>, double, float>;

template <typename T>
__device__ __forceinline__ ScaleOf<T> inverse_root(float squares, int64_t n, const Scalar& eps) {
  return ScaleOf<T>(1) / sqrt(ScaleOf<T>(squares) / n + ScaleOf<T>(eps.get()));
}

// Output of a kernel that stores elements of the input's type. A thread reads the parameters once.
template <typename T>
struct RmsNormOutput {
  using Params = RmsNormParams;
  using Element = T;
  ScaleOf<T> weight_offset;

  __device__ explicit RmsNormOutput(const Params& p) : weight_offset(p.weight_offset) {}
  template <int kN>
  __device__ __forceinline__ Vec<Element, kN> operator()(const float (&x)[kN], ScaleOf<T> scale,
                                                         const float (&weights)[kN]) const {
    float values[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) values[j] = x[j] * scale * (weights[j] + weight_offset);
    return Vec<Element, kN>::from_floats(values);
  }
};

// kVecs: vectors per thread. If they are few, registers remain for the weights, whose loads then overlap the
// sum.
template <typename T, typename Output, bool kWithResidual, int kVecs>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_kernel(const typename Output::Params p) {
  constexpr int kN = kVecBytes / sizeof(T);
  constexpr bool kWeightsEarly = kVecs == kFewVecs;
  using V = Vec<T, kN>;
  __shared__ __align__(16) float partial[32 * 32];
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool active = row < p.num_rows;
  const int num_vecs = active ? p.hidden_size / kN : 0;
  const T* in = static_cast<const T*>(p.input) + (active ? p.input_rows.offset(row) : 0);
  T* res = kWithResidual ? static_cast<T*>(p.residual) + (active ? p.residual_rows.offset(row) : 0) : nullptr;
  auto* out = static_cast<typename Output::Element*>(p.output) + (active ? p.output_rows.offset(row) : 0);
  const T* weight = static_cast<const T*>(p.weight);

  wait_for_inputs();
  launch_dependents();
  V x[kVecs], r[kVecs], early[kWeightsEarly ? kVecs : 1];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec < num_vecs) {
      x[i] = load_vec<T, kN>(in + vec * kN);
      if constexpr (kWithResidual) r[i] = load_vec<T, kN>(res + vec * kN);
      if constexpr (kWeightsEarly) early[i] = load_vec<T, kN>(weight + vec * kN);
    }
  }
  float sums[kWithResidual ? kVecs : 1][kN];  // input + residual before rounding
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec >= num_vecs) continue;
    float values[kN];
    x[i].to_floats(values);
    if constexpr (kWithResidual) {
      float other[kN];
      r[i].to_floats(other);
#pragma unroll
      for (int j = 0; j < kN; ++j) sums[i][j] = values[j] = values[j] + other[j];
      store_vec(res + vec * kN, V::from_floats(values));
    }
#pragma unroll
    for (int j = 0; j < kN; ++j) squares += values[j] * values[j];
  }
  const ScaleOf<T> scale = inverse_root<T>(row_sum(squares, partial), p.hidden_size, p.eps);
  const Output output(p);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec >= num_vecs) continue;
    float values[kN], weights[kN];
    if constexpr (kWeightsEarly) {
      early[i].to_floats(weights);
    } else {
      load_vec<T, kN>(weight + vec * kN).to_floats(weights);
    }
    if constexpr (!kWithResidual) x[i].to_floats(values);
    if constexpr (kWithResidual) {
      store_vec(out + vec * kN, output(sums[i], scale, weights));
    } else {
      store_vec(out + vec * kN, output(values, scale, weights));
    }
  }
}

template <typename T, typename Output>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_any_kernel(const typename Output::Params p) {
  __shared__ __align__(16) float partial[32];
  const int64_t row = blockIdx.x;
  const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(row);
  T* res = p.residual ? static_cast<T*>(p.residual) + p.residual_rows.offset(row) : nullptr;
  auto* out = static_cast<typename Output::Element*>(p.output) + p.output_rows.offset(row);
  const T* weight = static_cast<const T*>(p.weight);

  wait_for_inputs();
  launch_dependents();
  float squares = 0;
  for (int64_t i = threadIdx.x; i < p.hidden_size; i += blockDim.x) {
    const float x = to_float(in[i]) + (res ? to_float(res[i]) : 0.0f);
    squares += x * x;
  }
  const ScaleOf<T> scale = inverse_root<T>(row_sum(squares, partial), p.hidden_size, p.eps);
  const Output output(p);
  for (int64_t i = threadIdx.x; i < p.hidden_size; i += blockDim.x) {
    float x[1] = {to_float(in[i])};
    if (res) {
      x[0] += to_float(res[i]);
      res[i] = from_float<T>(x[0]);
    }
    const float weights[1] = {to_float(weight[i])};
    out[i] = output(x, scale, weights).at[0];
  }
}

// gamma or beta, in float32 or in the element type. The type is a run-time choice: a row reads them from the
// cache, and a second set of kernels would double the module.
template <typename T, int kN>
__device__ __forceinline__ void load_affine(const void* values, bool is_float32, int64_t at, float (&out)[kN]) {
  if (!is_float32) {
    load_vec<T, kN>(static_cast<const T*>(values) + at).to_floats(out);
    return;
  }
  constexpr int kStep = kN < 4 ? kN : 4;
#pragma unroll
  for (int i = 0; i < kN; i += kStep) {
    const auto part = load_vec<float, kStep>(static_cast<const float*>(values) + at + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) out[i + j] = part.at[j];
  }
}

// The same for LayerNorm.
template <typename T>
struct LayerNormOutput {
  using Params = LayerNormParams;
  using Element = T;

  __device__ explicit LayerNormOutput(const Params&) {}
  template <int kN>
  __device__ __forceinline__ Vec<Element, kN> operator()(const float (&values)[kN]) const {
    return Vec<Element, kN>::from_floats(values);
  }
};

template <typename T, typename Output>
__global__ void __launch_bounds__(kMaxThreads) layer_norm_kernel(const typename Output::Params p) {
  constexpr int kN = kVecBytes / sizeof(T);
  using V = Vec<T, kN>;
  __shared__ __align__(16) float partial[32 * 32];
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool active = row < p.num_rows;
  const int num_vecs = active ? p.hidden_size / kN : 0;
  const T* in = static_cast<const T*>(p.input) + (active ? p.input_rows.offset(row) : 0);
  auto* out = static_cast<typename Output::Element*>(p.output) + (active ? p.output_rows.offset(row) : 0);

  wait_for_inputs();
  launch_dependents();
  V x[kVecsPerThread];  // unpacked on use: packed it takes half the registers
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec < num_vecs) x[i] = load_vec<T, kN>(in + vec * kN);
  }
  float total = 0;
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) {
    if (threadIdx.x + i * blockDim.x >= num_vecs) continue;
    float values[kN];
    x[i].to_floats(values);
#pragma unroll
    for (int j = 0; j < kN; ++j) total += values[j];
  }
  const ScaleOf<T> mean = ScaleOf<T>(row_sum(total, partial)) / p.hidden_size;
  const float rounded_mean = mean;
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) {
    if (threadIdx.x + i * blockDim.x >= num_vecs) continue;
    float values[kN];
    x[i].to_floats(values);
#pragma unroll
    for (int j = 0; j < kN; ++j) squares += (values[j] - rounded_mean) * (values[j] - rounded_mean);
  }
  const ScaleOf<T> scale = inverse_root<T>(row_sum(squares, partial), p.hidden_size, p.eps);
  const Output output(p);
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec >= num_vecs) continue;
    float values[kN], gamma[kN], beta[kN];
    x[i].to_floats(values);
    load_affine<T>(p.gamma, p.affine_is_float32, vec * kN, gamma);
    load_affine<T>(p.beta, p.affine_is_float32, vec * kN, beta);
#pragma unroll
    for (int j = 0; j < kN; ++j) values[j] = (values[j] - mean) * scale * gamma[j] + beta[j];
    store_vec(out + vec * kN, output(values));
  }
}

template <typename T, typename Output>
__global__ void __launch_bounds__(kMaxThreads) layer_norm_any_kernel(const typename Output::Params p) {
  __shared__ __align__(16) float partial[32];
  const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(blockIdx.x);
  auto* out = static_cast<typename Output::Element*>(p.output) + p.output_rows.offset(blockIdx.x);

  wait_for_inputs();
  launch_dependents();
  float total = 0;
  for (int64_t i = threadIdx.x; i < p.hidden_size; i += blockDim.x) total += to_float(in[i]);
  const ScaleOf<T> mean = ScaleOf<T>(row_sum(total, partial)) / p.hidden_size;
  const float rounded_mean = mean;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < p.hidden_size; i += blockDim.x) {
    const float deviation = to_float(in[i]) - rounded_mean;
    squares += deviation * deviation;
  }
  const ScaleOf<T> scale = inverse_root<T>(row_sum(squares, partial), p.hidden_size, p.eps);
  const Output output(p);
  for (int64_t i = threadIdx.x; i < p.hidden_size; i += blockDim.x) {
    float gamma[1], beta[1];
    load_affine<T>(p.gamma, p.affine_is_float32, i, gamma);
    load_affine<T>(p.beta, p.affine_is_float32, i, beta);
    const float values[1] = {static_cast<float>((to_float(in[i]) - mean) * scale * gamma[0] + beta[0])};
    out[i] = output(values).at[0];
  }
}

// Return the block size: threads per row (x, a power of two) with at most `vecs` vectors each, and rows (y).
inline dim3 row_block(int64_t num_vecs, int vecs = kVecsPerThread) {
  unsigned threads = 1;
  while (threads * vecs < num_vecs) threads *= 2;
  constexpr unsigned kBlock = 128;
  return dim3(threads, threads < kBlock ? kBlock / threads : 1);
}

// Launch the vector kernel if every row is aligned to vectors and fits into registers, else the other one.
// `few` is the vector kernel for rows that do not fill the GPU: a thread holds fewer vectors. It adds in
// another order.
template <typename T, typename Params, typename... Strides>
void launch_rows(void (*vector_kernel)(Params), std::common_type_t<void (*)(Params)> few, void (*any_kernel)(Params),
                 const Params& p, const Launch& where, std::initializer_list<const void*> pointers,
                 const Strides&... strides) {
  const int64_t num_vecs = p.hidden_size * static_cast<int64_t>(sizeof(T)) / kVecBytes;
  if (!fits_vectors<T>(pointers, p.hidden_size, strides...) || num_vecs > kMaxThreads * kVecsPerThread) {
    launch(any_kernel, dim3(p.num_rows), dim3(p.hidden_size >= 512 ? 512 : 128), where, p);
    return;
  }
  const bool are_few = few && num_vecs <= kMaxThreads * kFewVecs && p.num_rows <= device_info(where.device).num_sms &&
                       !batch_invariant();
  const dim3 block = row_block(num_vecs, are_few ? kFewVecs : kVecsPerThread);
  launch(are_few ? few : vector_kernel, dim3((p.num_rows + block.y - 1) / block.y), block, where, p);
}

// An input vector maps to an output vector of possibly smaller elements: strides that align one align both.
template <typename T, typename Output = RmsNormOutput<T>>
void rms_norm(const typename Output::Params& p, const Launch& where) {
  launch_rows<T>(
      p.residual ? rms_norm_kernel<T, Output, true, kVecsPerThread> : rms_norm_kernel<T, Output, false, kVecsPerThread>,
      p.residual ? rms_norm_kernel<T, Output, true, kFewVecs> : rms_norm_kernel<T, Output, false, kFewVecs>,
      rms_norm_any_kernel<T, Output>, p, where, {p.input, p.residual, p.weight, p.output}, p.input_rows,
      p.residual_rows, p.output_rows);
}

template <typename T, typename Output = LayerNormOutput<T>>
void layer_norm(const typename Output::Params& p, const Launch& where) {
  launch_rows<T>(layer_norm_kernel<T, Output>, nullptr, layer_norm_any_kernel<T, Output>, p, where,
                 {p.input, p.gamma, p.beta, p.output}, p.input_rows, p.output_rows);
}

}  // namespace flashinfer::cuda
