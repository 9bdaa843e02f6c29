// Activation between the two products of an expert on CUDA. Equations: common/fused_moe.h.
#pragma once

#include <cstdint>

#include <flashinfer/common/fused_moe.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/quantize.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kActivateThreads = 128;
constexpr int kQuantPerLane = 4;  // elements per lane of the warp that quantises a block

struct MoeMath {
  static __device__ __forceinline__ float exp(float x) { return __expf(x); }
  static __device__ __forceinline__ float tanh(float x) { return tanhf(x); }
  static __device__ __forceinline__ float erf(float x) { return erff(x); }
};

// Load and activate kN elements of a row from `at` on.
template <typename T, int kN>
__device__ __forceinline__ void load_activated(const ActivateParams& p, int64_t row, int expert, int64_t at,
                                               const GateParameters& numbers, float (&out)[kN]) {
  const T* in = static_cast<const T*>(p.input) + row * p.input_stride;
  const bool gated = is_gated(p.act);
  const Vec<T, kN> first = load_vec<T, kN>(in + p.linear_at() + at);
  Vec<T, kN> second = first;
  if (gated) second = load_vec<T, kN>(in + p.gate_at() + at);
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    float up = to_float(first.at[i]), gate = to_float(second.at[i]);
    if (p.bias) {
      const float* bias = p.bias + expert * p.width() + at + i;
      up += bias[p.linear_at()], gate += bias[p.gate_at()];
    }
    out[i] = activate<MoeMath>(p.act, gate, up, numbers);
  }
}

// A CTA takes row blockIdx.x and every gridDim.x-th after it. The kernel reads the number of rows on the
// device.
template <typename T, int kN>
__global__ void __launch_bounds__(kActivateThreads) activate_rows_kernel(const ActivateParams p) {
  wait_for_inputs();
  launch_dependents();
  const int64_t count = p.count();
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    const int expert = p.indptr ? p.expert(row) : 0;
    const GateParameters numbers(p, expert);
    const int64_t first = (int64_t{blockIdx.y} * kActivateThreads + threadIdx.x) * kN;
    for (int64_t at = first; at < p.size; at += int64_t{gridDim.y} * kActivateThreads * kN) {
      float values[kN];
      load_activated<T, kN>(p, row, expert, at, numbers, values);
      if (p.quant_scale) {
        const float factor = *p.quant_scale;
        auto* out = static_cast<uint8_t*>(p.output) + row * p.size + at;
#pragma unroll
        for (int i = 0; i < kN; ++i) values[i] *= factor;
        const Vec<uint8_t, kN> bytes = quantize(values, DType::kFloat8E4M3);
#pragma unroll
        for (int i = 0; i < kN; ++i) out[i] = bytes.at[i];
      } else {
        T* out = static_cast<T*>(p.output) + row * p.size + at;
        if constexpr (kN == 1) {
          *out = from_float<T>(values[0]);
        } else {
          store_vec(out, Vec<T, kN>::from_floats(values));
        }
      }
    }
  }
}

// A warp quantises a block of 128 elements, four per lane.
template <typename T, int kN>
__global__ void __launch_bounds__(kActivateThreads) quantize_rows_kernel(const ActivateParams p) {
  wait_for_inputs();
  launch_dependents();
  const int64_t count = p.count(), blocks = (p.size + kQuantBlock - 1) / kQuantBlock;
  constexpr int kWarps = kActivateThreads / 32;
  for (int64_t block = int64_t{blockIdx.y} * kWarps + threadIdx.x / 32; block < blocks; block += gridDim.y * kWarps) {
    const int64_t first = block * kQuantBlock + threadIdx.x % 32 * kQuantPerLane;
    for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
      const int expert = p.indptr ? p.expert(row) : 0;
      const GateParameters numbers(p, expert);
      float values[kQuantPerLane] = {}, max_abs = 0.f;
#pragma unroll
      for (int i = 0; i < kQuantPerLane; i += kN) {
        if (first + i >= p.size) continue;
        float some[kN];
        load_activated<T, kN>(p, row, expert, first + i, numbers, some);
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          values[i + j] = some[j];
          max_abs = fmaxf(max_abs, fabsf(some[j]));
        }
      }
      // Bits of nonnegative floats have the order of the floats.
      max_abs = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(max_abs)));
      const float scale = block_scale(max_abs);
      if (threadIdx.x % 32 == 0) p.block_scales[row * blocks + block] = scale;
      const float factor = 1.f / scale;
      auto* out = static_cast<uint8_t*>(p.output) + row * p.size + first;
#pragma unroll
      for (int i = 0; i < kQuantPerLane; ++i) values[i] *= factor;
      const Vec<uint8_t, kQuantPerLane> bytes = quantize(values, DType::kFloat8E4M3);
#pragma unroll
      for (int i = 0; i < kQuantPerLane; ++i)
        if (first + i < p.size) out[i] = bytes.at[i];
    }
  }
}

template <typename T>
void activate_rows(const ActivateParams& p, const Launch& where) {
  constexpr int kN = kVecBytes / static_cast<int>(sizeof(T));
  constexpr unsigned kMaxRows = 1u << 16;
  const auto rows = static_cast<unsigned>(p.rows < kMaxRows ? p.rows : kMaxRows);
  const auto grid = [&](int64_t columns) { return dim3(rows, columns < kMaxGridY ? columns : kMaxGridY); };
  if (p.block_scales) {
    const bool fits = reinterpret_cast<uintptr_t>(p.input) % (4 * sizeof(T)) == 0 && p.input_stride % 4 == 0 &&
                      p.size % kQuantPerLane == 0;
    const int64_t blocks = (p.size + kQuantBlock - 1) / kQuantBlock, warps = kActivateThreads / 32;
    const auto kernel = fits ? quantize_rows_kernel<T, kQuantPerLane> : quantize_rows_kernel<T, 1>;
    return launch(kernel, grid((blocks + warps - 1) / warps), kActivateThreads, where, p);
  }
  const bool fits = fits_vectors<T>({p.input, p.output}, p.input_stride, p.size);
  const int64_t step = int64_t{kActivateThreads} * (fits ? kN : 1);
  const auto kernel = fits ? activate_rows_kernel<T, kN> : activate_rows_kernel<T, 1>;
  launch(kernel, grid((p.size + step - 1) / step), kActivateThreads, where, p);
}

}  // namespace flashinfer::cuda
