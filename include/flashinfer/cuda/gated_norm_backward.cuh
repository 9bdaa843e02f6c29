// Gradients of RMSNorm with a gate on CUDA. common/gated_norm_backward.h has the equations. As in
// norm_backward.cuh, a CTA has a part of the rows of one group. Each thread has its own columns of each row,
// and their sums of the weight.
#pragma once

#include <algorithm>

#include <flashinfer/common/gated_norm.h>
#include <flashinfer/common/gated_norm_backward.h>
#include <flashinfer/cuda/gated_norm.cuh>
#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/norm_backward.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

inline int64_t gated_norm_backward_parts(int64_t num_rows, int64_t num_groups, int64_t, const Launch& where) {
  const int64_t limit = 4 * int64_t{device_info(where.device).num_sms} / (num_groups < 1 ? 1 : num_groups);
  return num_rows < limit ? num_rows : limit < 1 ? 1 : limit;
}

// Parameters of Part for the group of this CTA. Groups have separate columns of the weight.
struct GroupOfPart {
  int64_t hidden_size, num_rows, num_parts;
  void* parts;
};

// blockIdx.x: parts of the rows. blockIdx.y: groups, from first_group on.
template <typename T, template <typename> class Act, int kN>
__global__ void __launch_bounds__(kBackwardThreads)
    gated_rms_norm_backward_kernel(const GatedRmsNormBackwardParams p, int64_t first_group, bool sums_fit) {
  using S = ScaleOf<T>;
  using Function = GateFunction<T, Act>;
  extern __shared__ __align__(kVecBytes) unsigned char memory[];
  __shared__ __align__(16) float partial[kBackwardThreads];
  Part<S, 1> part(GroupOfPart{p.group_size, p.num_rows, p.num_parts, p.parts},
                  sums_fit ? reinterpret_cast<S*>(memory) : nullptr);
  const int64_t hidden = p.num_groups * p.group_size, start = (first_group + blockIdx.y) * p.group_size;
  part.result = static_cast<S*>(p.parts) + blockIdx.x * hidden + start;
  const T* weight = static_cast<const T*>(p.weight) + start;
  S* sums = part.mine();

  wait_for_inputs();
  part.template clear<kN>();
  for (int64_t row0 = part.first; row0 < part.end; row0 += blockDim.y) {
    const int64_t row = row0 + threadIdx.y, n = row < part.end ? part.n : 0;  // no columns without a row
    const int64_t real = n ? row : part.first;
    const T* in = group_of<T>(p.input, p.input_rows, real, start);
    const T* gate = group_of<T>(p.gate, p.gate_rows, real, start);
    const T* grad = group_of<T>(p.grad, p.grad_rows, real, start);
    T* grad_input = static_cast<T*>(p.grad_input) + real * hidden + start;
    T* grad_gate = static_cast<T*>(p.grad_gate) + real * hidden + start;
    float x[kN], z[kN], g[kN], w[kN], squares = 0, products = 0;
    for (int64_t i = threadIdx.x * kN; i < n; i += blockDim.x * kN) {
      load_floats(in + i, x), load_floats(gate + i, z), load_floats(grad + i, g), load_floats(weight + i, w);
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const float u = Function::apply(z[j], x[j]);
        squares += p.norm_before_gate ? x[j] * x[j] : u * u;
        products += g[j] * w[j] * u;
      }
    }
    const S r = inverse_root<T>(row_sum(squares, partial), part.n, p.eps);
    const S c = S(row_sum(products, partial)) / part.n * r * r * r;
    for (int64_t i = threadIdx.x * kN; i < n; i += blockDim.x * kN) {
      S terms[kN];
      load_floats(in + i, x), load_floats(gate + i, z), load_floats(grad + i, g), load_floats(weight + i, w);
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const S h = S(g[j]) * w[j], u = Function::apply(z[j], x[j]);
        terms[j] = g[j] * (u * r);
        S dx, dz;
        if (p.norm_before_gate) {
          dx = Function::apply(z[j], h) * r - x[j] * c;
          dz = Function::slope(z[j], h * x[j] * r);
        } else {
          const S du = h * r - u * c;
          dx = Function::apply(z[j], du);
          dz = Function::slope(z[j], du * x[j]);
        }
        x[j] = dx, z[j] = dz;
      }
      add_to(sums + i, terms);
      store_vec(grad_input + i, Vec<T, kN>::from_floats(x));
      store_vec(grad_gate + i, Vec<T, kN>::from_floats(z));
    }
  }
  part.finish();
  launch_dependents();
}

template <typename T, template <typename> class Act>
void gated_rms_norm_backward_of(const GatedRmsNormBackwardParams& p, const Launch& where) {
  using S = ScaleOf<T>;
  constexpr int kWide = kVecBytes / sizeof(T);
  const int64_t hidden = p.num_groups * p.group_size;
  const bool aligned = fits_vectors<T>({p.grad, p.input, p.gate, p.weight, p.grad_input, p.grad_gate}, p.group_size,
                                       p.grad_rows, p.input_rows, p.gate_rows);
  const int64_t steps = p.group_size / (aligned ? kWide : 1);
  unsigned threads = 1;
  while (threads < kBackwardThreads && 2 * threads < steps) threads *= 2;
  const dim3 block(threads, kBackwardThreads / threads);
  const int64_t bytes = p.group_size * block.y * static_cast<int64_t>(sizeof(S));
  const bool fit = bytes <= kMaxSumBytes;
  for (int64_t first = 0; first < p.num_groups; first += kMaxGridY) {
    const dim3 grid(p.num_parts, std::min<int64_t>(p.num_groups - first, kMaxGridY));
    aligned
        ? Kernel<gated_rms_norm_backward_kernel<T, Act, kWide>>::launch(grid, block, fit ? bytes : 0, where, p, first,
                                                                        fit)
        : Kernel<gated_rms_norm_backward_kernel<T, Act, 1>>::launch(grid, block, fit ? bytes : 0, where, p, first, fit);
  }
  sum_parts<S, T>(p.parts, p.num_parts, hidden, hidden, p.grad_weight, where);
}

template <typename T>
void gated_rms_norm_backward(const GatedRmsNormBackwardParams& p, const Launch& where) {
  p.sigmoid ? gated_rms_norm_backward_of<T, Sigmoid>(p, where) : gated_rms_norm_backward_of<T, Silu>(p, where);
}

}  // namespace flashinfer::cuda
