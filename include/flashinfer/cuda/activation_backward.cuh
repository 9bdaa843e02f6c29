// Gradient of act(x) * y on CUDA, in one pass over memory with the thread layout of the forward kernel.
#pragma once

#include <initializer_list>
#include <type_traits>

#include <flashinfer/common/activation_backward.h>
#include <flashinfer/cuda/activation.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

template <typename T, int kN, template <typename> class Act>
__global__ void __launch_bounds__(kActThreads) act_and_mul_backward_kernel(const ActAndMulBackwardParams p) {
  using Function = Act<std::conditional_t<std::is_same_v<T, float>, DoubleMath, FloatMath>>;
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= p.num_rows) return;
  const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(row);
  const T* grad = static_cast<const T*>(p.grad) + p.grad_rows.offset(row);
  T* out = static_cast<T*>(p.grad_input) + 2 * p.out_size * row;

  wait_for_inputs();
  const int64_t step = int64_t{gridDim.y} * blockDim.x * kN;
  for (int64_t at = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kN; at < p.out_size; at += step) {
    float x[kN], y[kN], g[kN];
    const auto gate = load_vec<T, kN>(in + at), factor = load_vec<T, kN>(in + p.out_size + at);
    const auto upstream = load_vec<T, kN>(grad + at);
    gate.to_floats(x), factor.to_floats(y), upstream.to_floats(g);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      y[j] = static_cast<float>(Function::slope(x[j], g[j]) * y[j]);
      g[j] = static_cast<float>(Function::apply(x[j], g[j]));
    }
    store_vec(out + at, Vec<T, kN>::from_floats(y));
    store_vec(out + p.out_size + at, Vec<T, kN>::from_floats(g));
  }
  launch_dependents();
}

template <typename T, template <typename> class Act>
void act_and_mul_backward(const ActAndMulBackwardParams& p, const Launch& where) {
  constexpr int kN = kVecBytes / sizeof(T);
  if (p.num_rows == 0) return;
  const bool aligned = fits_vectors<T>({p.grad, p.input, p.grad_input}, p.out_size, p.input_rows, p.grad_rows);
  const int64_t steps = p.out_size / (aligned ? kN : 1);
  unsigned threads = 1;
  while (threads < kActThreads && threads < steps) threads *= 2;
  const dim3 block(threads, kActThreads / threads);
  const int64_t tiles = (steps + threads - 1) / threads;
  constexpr int64_t kMaxTiles = 65535;  // the limit of gridDim.y
  const dim3 grid((p.num_rows + block.y - 1) / block.y, tiles < kMaxTiles ? tiles : kMaxTiles);
  launch(aligned ? act_and_mul_backward_kernel<T, kN, Act> : act_and_mul_backward_kernel<T, 1, Act>, grid, block, where,
         p);
}

}  // namespace flashinfer::cuda
