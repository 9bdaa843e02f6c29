// Gradients of RMSNorm and LayerNorm on CUDA; equations in common/norm_backward.h. A CTA takes a part of the
// rows, reads them from memory once and again from the cache, and sums the weights' gradients in shared
// memory. Each thread owns columns, so adding needs no synchronisation. A second kernel adds the parts.
#pragma once

#include <type_traits>

#include <flashinfer/common/norm_backward.h>
#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/norm.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kBackwardThreads = 256;
constexpr int kMaxSumBytes = 46 * 1024;  // shared memory; longer rows are summed in global memory

inline int64_t norm_backward_parts(int64_t num_rows, int64_t, const Launch& where) {
  const int64_t limit = 4 * int64_t{device_info(where.device).num_sms};
  return num_rows < limit ? num_rows : limit;
}

// The rows of a CTA's part and its sums: kArrays * n, of which a thread accesses its own columns only.
template <typename S, int kArrays>
struct Part {
  int64_t n, first, end;
  S* result;
  S* shared;  // null if the sums do not fit

  template <typename Params>
  __device__ __forceinline__ Part(const Params& p, S* shared_) : n(p.hidden_size), shared(shared_) {
    first = p.num_rows * blockIdx.x / p.num_parts, end = p.num_rows * (blockIdx.x + 1) / p.num_parts;
    result = static_cast<S*>(p.parts) + kArrays * n * blockIdx.x;
  }

  __device__ __forceinline__ S* mine() const { return shared ? shared + kArrays * n * threadIdx.y : result; }

  template <int kN>
  __device__ __forceinline__ void clear() const {
    S* sums = mine();
    for (int64_t i = threadIdx.x * kN; i < n; i += blockDim.x * kN) {
#pragma unroll
      for (int j = 0; j < kN; ++j) {
#pragma unroll
        for (int array = 0; array < kArrays; ++array) sums[array * n + i + j] = S(0);
      }
    }
  }

  // Add the rows of a CTA in the order of threadIdx.y.
  __device__ __forceinline__ void finish() const {
    if (!shared) return;
    __syncthreads();
    for (int64_t i = threadIdx.y * blockDim.x + threadIdx.x; i < kArrays * n; i += blockDim.x * blockDim.y) {
      S total = 0;
      for (int y = 0; y < blockDim.y; ++y) total += shared[kArrays * n * y + i];
      result[i] = total;
    }
  }
};

template <typename S, int kN>
__device__ __forceinline__ void add_to(S* sums, const S (&terms)[kN]) {
  constexpr int kFit = kVecBytes / sizeof(S), kStep = kN < kFit ? kN : kFit;
#pragma unroll
  for (int i = 0; i < kN; i += kStep) {
    auto some = load_vec<S, kStep>(sums + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) some.at[j] += terms[i + j];
    *reinterpret_cast<Vec<S, kStep>*>(sums + i) = some;
  }
}

template <typename T, int kN>
__device__ __forceinline__ void load_floats(const T* from, float (&out)[kN]) {
  load_vec<T, kN>(from).to_floats(out);
}

template <typename T, int kN>
__global__ void __launch_bounds__(kBackwardThreads)
    rms_norm_backward_kernel(const RmsNormBackwardParams p, bool sums_fit) {
  using S = ScaleOf<T>;
  extern __shared__ __align__(kVecBytes) unsigned char memory[];
  __shared__ __align__(16) float partial[kBackwardThreads];
  const Part<S, 1> part(p, sums_fit ? reinterpret_cast<S*>(memory) : nullptr);
  const T* weight = static_cast<const T*>(p.weight);
  S* sums = part.mine();

  wait_for_inputs();
  part.template clear<kN>();
  for (int64_t row0 = part.first; row0 < part.end; row0 += blockDim.y) {
    const int64_t row = row0 + threadIdx.y, n = row < part.end ? part.n : 0;  // no columns without a row
    const T* in = static_cast<const T*>(p.input) + (n ? p.input_rows.offset(row) : 0);
    const T* grad = static_cast<const T*>(p.grad) + (n ? p.grad_rows.offset(row) : 0);
    const T* more = p.grad_sum && n ? static_cast<const T*>(p.grad_sum) + p.grad_sum_rows.offset(row) : nullptr;
    T* out = static_cast<T*>(p.grad_input) + row * part.n;
    float x[kN], g[kN], w[kN], squares = 0, products = 0;
    for (int64_t i = threadIdx.x * kN; i < n; i += blockDim.x * kN) {
      load_floats(in + i, x), load_floats(grad + i, g), load_floats(weight + i, w);
#pragma unroll
      for (int j = 0; j < kN; ++j) squares += x[j] * x[j], products += g[j] * (w[j] + p.weight_offset) * x[j];
    }
    const S r = inverse_root<T>(row_sum(squares, partial), part.n, p.eps);
    const S c = S(row_sum(products, partial)) / part.n * r * r * r;
    for (int64_t i = threadIdx.x * kN; i < n; i += blockDim.x * kN) {
      S terms[kN];
      float result[kN];
      load_floats(in + i, x), load_floats(grad + i, g), load_floats(weight + i, w);
#pragma unroll
      for (int j = 0; j < kN; ++j) terms[j] = g[j] * (x[j] * r);
      add_to(sums + i, terms);
#pragma unroll
      for (int j = 0; j < kN; ++j) terms[j] = g[j] * ((w[j] + S(p.weight_offset)) * r) - x[j] * c;
      if (more) {
        load_floats(more + i, w);
#pragma unroll
        for (int j = 0; j < kN; ++j) terms[j] += w[j];
      }
#pragma unroll
      for (int j = 0; j < kN; ++j) result[j] = terms[j];
      store_vec(out + i, Vec<T, kN>::from_floats(result));
    }
  }
  part.finish();
  launch_dependents();
}

template <typename T, int kN>
__global__ void __launch_bounds__(kBackwardThreads)
    layer_norm_backward_kernel(const LayerNormBackwardParams p, bool sums_fit) {
  using S = ScaleOf<T>;
  extern __shared__ __align__(kVecBytes) unsigned char memory[];
  __shared__ __align__(16) float partial[kBackwardThreads];
  const Part<S, 2> part(p, sums_fit ? reinterpret_cast<S*>(memory) : nullptr);
  S* sums = part.mine();

  wait_for_inputs();
  part.template clear<kN>();
  for (int64_t row0 = part.first; row0 < part.end; row0 += blockDim.y) {
    const int64_t row = row0 + threadIdx.y, n = row < part.end ? part.n : 0;  // no columns without a row
    const T* in = static_cast<const T*>(p.input) + (n ? p.input_rows.offset(row) : 0);
    const T* grad = static_cast<const T*>(p.grad) + (n ? p.grad_rows.offset(row) : 0);
    T* out = static_cast<T*>(p.grad_input) + row * part.n;
    float x[kN], g[kN], w[kN], total = 0, squares = 0, grads = 0, products = 0;
    for (int64_t i = threadIdx.x * kN; i < n; i += blockDim.x * kN) {
      load_floats(in + i, x);
#pragma unroll
      for (int j = 0; j < kN; ++j) total += x[j];
    }
    const S mean = S(row_sum(total, partial)) / part.n;
    for (int64_t i = threadIdx.x * kN; i < n; i += blockDim.x * kN) {
      load_floats(in + i, x), load_floats(grad + i, g), load_affine<T>(p.gamma, p.affine_is_float32, i, w);
      float few = 0;  // squares of half types may be equal, so the errors of a long sum would not cancel
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const float deviation = x[j] - mean, weighted = g[j] * w[j];
        few += deviation * deviation, grads += weighted, products += weighted * deviation;
      }
      squares += few;
    }
    const S r = inverse_root<T>(row_sum(squares, partial), part.n, p.eps);
    const S a = S(row_sum(grads, partial)) / part.n, b = S(row_sum(products, partial)) / part.n * r;
    for (int64_t i = threadIdx.x * kN; i < n; i += blockDim.x * kN) {
      S terms[kN], wide[kN];
      float result[kN];
      load_floats(in + i, x), load_floats(grad + i, g), load_affine<T>(p.gamma, p.affine_is_float32, i, w);
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const S normed = (x[j] - mean) * r;
        result[j] = (S(g[j]) * w[j] - a - normed * b) * r;
        terms[j] = g[j] * normed, wide[j] = g[j];
      }
      add_to(sums + i, terms);
      add_to(sums + part.n + i, wide);
      store_vec(out + i, Vec<T, kN>::from_floats(result));
    }
  }
  part.finish();
  launch_dependents();
}

// out[i] = sum over parts of parts[part * stride + i]. threadIdx.x and blockIdx.x cover i, threadIdx.y the
// parts.
template <typename S, typename W>
__global__ void __launch_bounds__(kBackwardThreads)
    sum_parts_kernel(const S* parts, int64_t num_parts, int64_t stride, int64_t n, W* out) {
  __shared__ S partial[kBackwardThreads];
  const int64_t i = int64_t{blockIdx.x} * 32 + threadIdx.x;
  wait_for_inputs();
  S total = 0;
  for (int64_t part = threadIdx.y; i < n && part < num_parts; part += blockDim.y) total += parts[part * stride + i];
  partial[threadIdx.y * 32 + threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y == 0 && i < n) {
    for (int y = 1; y < blockDim.y; ++y) total += partial[y * 32 + threadIdx.x];
    out[i] = from_float<W>(static_cast<float>(total));
  }
  launch_dependents();
}

template <typename S, typename W>
void sum_parts(const void* parts, int64_t num_parts, int64_t stride, int64_t n, void* out, const Launch& where) {
  launch(sum_parts_kernel<S, W>, dim3((n + 31) / 32), dim3(32, kBackwardThreads / 32), where,
         static_cast<const S*>(parts), num_parts, stride, n, static_cast<W*>(out));
}

// Return the block size, threads per row (x, a power of two) and rows, and the bytes of the sums of `arrays`
// weights. The sums are in shared memory if they fit. They always fit if a CTA has several rows at a time.
template <auto kKernel, typename S, typename Params>
void launch_parts(const Params& p, int vec, int arrays, const Launch& where) {
  const int64_t steps = p.hidden_size / vec;
  unsigned threads = 1;
  while (threads < kBackwardThreads && 2 * threads < steps) threads *= 2;
  const dim3 block(threads, kBackwardThreads / threads);
  const int64_t bytes = arrays * p.hidden_size * block.y * static_cast<int64_t>(sizeof(S));
  const bool fit = bytes <= kMaxSumBytes;
  Kernel<kKernel>::launch(dim3(p.num_parts), block, fit ? bytes : 0, where, p, fit);
}

template <typename T>
void rms_norm_backward(const RmsNormBackwardParams& p, const Launch& where) {
  using S = ScaleOf<T>;
  constexpr int kN = kVecBytes / sizeof(T);
  const bool aligned = fits_vectors<T>({p.grad, p.input, p.weight, p.grad_sum, p.grad_input}, p.hidden_size,
                                       p.grad_rows, p.input_rows, p.grad_sum_rows);
  aligned ? launch_parts<rms_norm_backward_kernel<T, kN>, S>(p, kN, 1, where)
          : launch_parts<rms_norm_backward_kernel<T, 1>, S>(p, 1, 1, where);
  sum_parts<S, T>(p.parts, p.num_parts, p.hidden_size, p.hidden_size, p.grad_weight, where);
}

template <typename T, typename W>
void layer_norm_backward(const LayerNormBackwardParams& p, const Launch& where) {
  using S = ScaleOf<T>;
  constexpr int kN = kVecBytes / sizeof(T);
  const bool aligned =
      fits_vectors<T>({p.grad, p.input, p.gamma, p.grad_input}, p.hidden_size, p.grad_rows, p.input_rows);
  aligned ? launch_parts<layer_norm_backward_kernel<T, kN>, S>(p, kN, 2, where)
          : launch_parts<layer_norm_backward_kernel<T, 1>, S>(p, 1, 2, where);
  const S* parts = static_cast<const S*>(p.parts);
  sum_parts<S, W>(parts, p.num_parts, 2 * p.hidden_size, p.hidden_size, p.grad_gamma, where);
  sum_parts<S, W>(parts + p.hidden_size, p.num_parts, 2 * p.hidden_size, p.hidden_size, p.grad_beta, where);
}

}  // namespace flashinfer::cuda
