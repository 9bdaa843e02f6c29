// RMSNorm with a gate on CUDA. common/gated_norm.h has the equations. Threads of one CTA have a group of a
// row in registers between the sum and the result, so memory is read once and written once. A CTA reads
// groups twice if they are too long or not aligned.
#pragma once

#include <type_traits>

#include <flashinfer/common/gated_norm.h>
#include <flashinfer/cuda/activation.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/norm.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

template <typename T, template <typename> class Act>
using GateFunction = Act<std::conditional_t<std::is_same_v<T, float>, DoubleMath, FloatMath>>;

// Return the start of a group of a row.
template <typename T>
__device__ __forceinline__ const T* group_of(const void* tensor, const Rows& rows, int64_t row, int64_t start) {
  return static_cast<const T*>(tensor) + rows.offset(row) + start;
}

// kVecs: vectors per thread. threadIdx.y and blockIdx.x index the groups of all rows.
template <typename T, template <typename> class Act, bool kBefore, int kVecs>
__global__ void __launch_bounds__(kMaxThreads) gated_rms_norm_kernel(const GatedRmsNormParams p) {
  using Function = GateFunction<T, Act>;
  constexpr int kN = kVecBytes / sizeof(T);
  __shared__ __align__(16) float partial[32 * 32];
  const int64_t item = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool active = item < p.num_rows * p.num_groups;
  const int64_t row = active ? item / p.num_groups : 0, start = active ? item % p.num_groups * p.group_size : 0;
  const int num_vecs = active ? p.group_size / kN : 0;
  const T* in = group_of<T>(p.input, p.input_rows, row, start);
  const T* gate = group_of<T>(p.gate, p.gate_rows, row, start);
  const T* weight = static_cast<const T*>(p.weight) + start;
  T* out = const_cast<T*>(group_of<T>(p.output, p.output_rows, row, start));

  wait_for_inputs();
  launch_dependents();
  Vec<T, kN> x[kVecs], z[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec < num_vecs) x[i] = load_vec<T, kN>(in + vec * kN), z[i] = load_vec<T, kN>(gate + vec * kN);
  }
  float u[kVecs][kN], squares = 0;  // x, multiplied by the gate if the norm follows it
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (threadIdx.x + i * blockDim.x >= num_vecs) continue;
    x[i].to_floats(u[i]);
    if constexpr (!kBefore) {
      float gates[kN];
      z[i].to_floats(gates);
#pragma unroll
      for (int j = 0; j < kN; ++j) u[i][j] = Function::apply(gates[j], u[i][j]);
    }
#pragma unroll
    for (int j = 0; j < kN; ++j) squares += u[i][j] * u[i][j];
  }
  const ScaleOf<T> scale = inverse_root<T>(row_sum(squares, partial), p.group_size, p.eps);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec >= num_vecs) continue;
    float weights[kN], gates[kN];
    load_vec<T, kN>(weight + vec * kN).to_floats(weights);
    z[i].to_floats(gates);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const ScaleOf<T> normed = u[i][j] * scale * weights[j];
      u[i][j] = kBefore ? Function::apply(gates[j], normed) : normed;
    }
    store_vec(out + vec * kN, Vec<T, kN>::from_floats(u[i]));
  }
}

template <typename T, template <typename> class Act>
__global__ void __launch_bounds__(kMaxThreads) gated_rms_norm_any_kernel(const GatedRmsNormParams p) {
  using Function = GateFunction<T, Act>;
  __shared__ __align__(16) float partial[32];
  const int64_t row = blockIdx.x / p.num_groups, start = blockIdx.x % p.num_groups * p.group_size;
  const T* in = group_of<T>(p.input, p.input_rows, row, start);
  const T* gate = group_of<T>(p.gate, p.gate_rows, row, start);
  const T* weight = static_cast<const T*>(p.weight) + start;
  T* out = const_cast<T*>(group_of<T>(p.output, p.output_rows, row, start));

  wait_for_inputs();
  launch_dependents();
  const auto gated = [&](int64_t i, ScaleOf<T> x) { return Function::apply(to_float(gate[i]), x); };
  float squares = 0;
  for (int64_t i = threadIdx.x; i < p.group_size; i += blockDim.x) {
    const float x = to_float(in[i]), u = p.norm_before_gate ? x : static_cast<float>(gated(i, x));
    squares += u * u;
  }
  const ScaleOf<T> scale = inverse_root<T>(row_sum(squares, partial), p.group_size, p.eps);
  for (int64_t i = threadIdx.x; i < p.group_size; i += blockDim.x)
    out[i] = from_float<T>(static_cast<float>(gated(i, to_float(in[i]) * scale * to_float(weight[i]))));
}

template <typename T, template <typename> class Act>
void gated_rms_norm_of(const GatedRmsNormParams& p, const Launch& where) {
  const int64_t num_vecs = p.group_size * static_cast<int64_t>(sizeof(T)) / kVecBytes,
                items = p.num_rows * p.num_groups;
  if (!fits_vectors<T>({p.input, p.gate, p.weight, p.output}, p.group_size, p.input_rows, p.gate_rows, p.output_rows) ||
      num_vecs > kMaxThreads * kVecsPerThread) {
    launch(gated_rms_norm_any_kernel<T, Act>, dim3(items), dim3(p.group_size >= 512 ? 512 : 128), where, p);
    return;
  }
  const bool few =
      num_vecs <= kMaxThreads * kFewVecs;  // two loads per tensor are enough in flight, and take few registers
  const dim3 block = row_block(num_vecs, few ? kFewVecs : kVecsPerThread);
  const auto kernel = p.norm_before_gate ? few ? gated_rms_norm_kernel<T, Act, true, kFewVecs>
                                               : gated_rms_norm_kernel<T, Act, true, kVecsPerThread>
                      : few              ? gated_rms_norm_kernel<T, Act, false, kFewVecs>
                                         : gated_rms_norm_kernel<T, Act, false, kVecsPerThread>;
  launch(kernel, dim3((items + block.y - 1) / block.y), block, where, p);
}

template <typename T>
void gated_rms_norm(const GatedRmsNormParams& p, const Launch& where) {
  p.sigmoid ? gated_rms_norm_of<T, Sigmoid>(p, where) : gated_rms_norm_of<T, Silu>(p, where);
}

}  // namespace flashinfer::cuda
