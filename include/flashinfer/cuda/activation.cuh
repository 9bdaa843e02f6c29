// act(x) * y on CUDA, in one pass over memory. A thread moves kPairsPerThread vectors of each half of a row
// and issues all loads before the first use. threadIdx.x and blockIdx.y cover a row, threadIdx.y and
// blockIdx.x the rows.
#pragma once

#include <initializer_list>
#include <type_traits>

#include <flashinfer/common/activation.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/ptx/approx.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kPairsPerThread = 2;
constexpr int kActThreads = 128;

// Arithmetic for half types: single instructions with errors far below the last bit of the result.
struct FloatMath {
  using V = float;
  using S = float;
  static constexpr double kMaxHalfExponent = 86.0;

  static __device__ __forceinline__ float exp(float x) { return ptx::ex2_approx(x * 1.44269504f); }
  static __device__ __forceinline__ float divide(float a, float b) { return a * ptx::rcp_approx(b); }
  static __device__ __forceinline__ float abs(float x) { return fabsf(x); }
  static __device__ __forceinline__ float select_less(float a, float b, float yes, float no) {
    return a < b ? yes : no;
  }
};

// Arithmetic for float32.
struct DoubleMath {
  using V = double;
  using S = double;
  static constexpr double kMaxHalfExponent = 300.0;

  static __device__ __forceinline__ double exp(double x) { return ::exp(x); }
  static __device__ __forceinline__ double divide(double a, double b) { return a / b; }
  static __device__ __forceinline__ double abs(double x) { return fabs(x); }
  static __device__ __forceinline__ double select_less(double a, double b, double yes, double no) {
    return a < b ? yes : no;
  }
};

template <typename T, int kN, template <typename> class Act>
__global__ void __launch_bounds__(kActThreads) act_and_mul_kernel(const ActAndMulParams p) {
  using Function = Act<std::conditional_t<std::is_same_v<T, float>, DoubleMath, FloatMath>>;
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= p.num_rows) return;
  const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(row);
  T* out = static_cast<T*>(p.output) + p.output_rows.offset(row);

  wait_for_inputs();
  launch_dependents();
  const int64_t tile = int64_t{blockDim.x} * kPairsPerThread * kN;
  for (int64_t start = blockIdx.y * tile; start < p.out_size; start += gridDim.y * tile) {
    Vec<T, kN> x[kPairsPerThread], y[kPairsPerThread];
#pragma unroll
    for (int i = 0; i < kPairsPerThread; ++i) {
      const int64_t at = start + (threadIdx.x + i * blockDim.x) * kN;
      if (at < p.out_size) {
        x[i] = load_vec<T, kN>(in + at);
        y[i] = load_vec<T, kN>(in + p.out_size + at);
      }
    }
#pragma unroll
    for (int i = 0; i < kPairsPerThread; ++i) {
      const int64_t at = start + (threadIdx.x + i * blockDim.x) * kN;
      if (at >= p.out_size) continue;
      float a[kN], b[kN];
      x[i].to_floats(a);
      y[i].to_floats(b);
#pragma unroll
      for (int j = 0; j < kN; ++j) a[j] = static_cast<float>(Function::apply(a[j], b[j]));
      store_vec(out + at, Vec<T, kN>::from_floats(a));
    }
  }
}

template <typename T, template <typename> class Act>
void act_and_mul(const ActAndMulParams& p, const Launch& where) {
  constexpr int kN = kVecBytes / sizeof(T);
  if (p.num_rows == 0) return;
  const bool aligned = fits_vectors<T>({p.input, p.output}, p.out_size, p.input_rows, p.output_rows);
  const int64_t steps = p.out_size / (aligned ? kN : 1);
  unsigned threads = 1;
  while (threads < kActThreads && threads * kPairsPerThread < steps) threads *= 2;
  const dim3 block(threads, kActThreads / threads);
  const int64_t tiles = (steps + threads * kPairsPerThread - 1) / (threads * kPairsPerThread);
  constexpr int64_t kMaxTiles = 65535;  // the limit of gridDim.y
  const dim3 grid((p.num_rows + block.y - 1) / block.y, tiles < kMaxTiles ? tiles : kMaxTiles);
  launch(aligned ? act_and_mul_kernel<T, kN, Act> : act_and_mul_kernel<T, 1, Act>, grid, block, where, p);
}

}  // namespace flashinfer::cuda
