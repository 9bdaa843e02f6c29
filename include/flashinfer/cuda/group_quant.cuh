// Quantisation of groups on CUDA. Memory bounds it: each element is read once and written once.
#pragma once

#include <cstdint>

#include <flashinfer/common/group_quant.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/quantize.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda {

constexpr int kGroupThreads = 256;

// A group is a vector of each of kGroupLanes adjacent lanes. All lanes of a warp take part in the shuffles.
template <typename T, int kGroupLanes>
__global__ void __launch_bounds__(kGroupThreads) group_quant_kernel(const GroupQuantParams p) {
  constexpr int kN = kVecBytes / sizeof(T), kGroups = kGroupThreads / kGroupLanes;
  const int64_t number = int64_t{blockIdx.x} * kGroups + threadIdx.x / kGroupLanes;
  const bool valid = number < p.num_rows * p.num_groups;
  const int64_t row = valid ? number / p.num_groups : 0, group = valid ? number % p.num_groups : 0;
  const int lane = threadIdx.x % kGroupLanes;
  const int64_t column = group * p.group_size + lane * kN;
  wait_for_inputs();
  launch_dependents();
  float values[kN], maximum = 0;
  load_vec<T, kN>(static_cast<const T*>(p.input) + row * p.input_stride + column).to_floats(values);
#pragma unroll
  for (int j = 0; j < kN; ++j) maximum = fmaxf(maximum, fabsf(values[j]));
  const float scale = p.scale_of(lanes_max<kGroupLanes>(maximum));
  if (!valid) return;
#pragma unroll
  for (int j = 0; j < kN; ++j) values[j] = __fdividef(values[j], scale);
  store_vec(static_cast<uint8_t*>(p.output) + row * p.output_stride + column, quantize(values, p.output_dtype));
  if (lane == 0) p.scale[row * p.scale_row_stride + group * p.scale_group_stride] = scale;
}

// A warp has a group of any size. Its second pass hits the L1 cache.
template <typename T>
__global__ void __launch_bounds__(kGroupThreads) group_quant_any_kernel(const GroupQuantParams p) {
  const int64_t number = int64_t{blockIdx.x} * (kGroupThreads / 32) + threadIdx.x / 32;
  wait_for_inputs();
  launch_dependents();
  if (number >= p.num_rows * p.num_groups) return;
  const int64_t row = number / p.num_groups, group = number % p.num_groups;
  const T* in = static_cast<const T*>(p.input) + row * p.input_stride + group * p.group_size;
  uint8_t* out = static_cast<uint8_t*>(p.output) + row * p.output_stride + group * p.group_size;
  const int lane = threadIdx.x % 32;
  float maximum = 0;
  for (int64_t i = lane; i < p.group_size; i += 32) maximum = fmaxf(maximum, fabsf(to_float(in[i])));
  const float scale = p.scale_of(lanes_max<32>(maximum));
  for (int64_t i = lane; i < p.group_size; i += 32) {
    const float value[1] = {__fdividef(to_float(in[i]), scale)};
    out[i] = quantize(value, p.output_dtype).at[0];
  }
  if (lane == 0) p.scale[row * p.scale_row_stride + group * p.scale_group_stride] = scale;
}

template <typename T>
void group_quant(const GroupQuantParams& p, const Launch& where) {
  constexpr int kN = kVecBytes / sizeof(T);
  const auto run = [&](auto kernel, int groups) {
    const int64_t ctas = (p.num_rows * p.num_groups + groups - 1) / groups;
    launch(kernel, dim3(static_cast<unsigned>(ctas)), dim3(kGroupThreads), where, p);
  };
  // An output row needs vectors of kN bytes only, but the inputs' alignment is that of 16 bytes.
  if (fits_vectors<T>({p.input}, p.input_stride) && reinterpret_cast<uintptr_t>(p.output) % kN == 0 &&
      p.output_stride % kN == 0) {
    if (p.group_size == 4 * kN) return run(group_quant_kernel<T, 4>, kGroupThreads / 4);
    if (p.group_size == 8 * kN) return run(group_quant_kernel<T, 8>, kGroupThreads / 8);
    if (p.group_size == 16 * kN) return run(group_quant_kernel<T, 16>, kGroupThreads / 16);
    if (p.group_size == 32 * kN) return run(group_quant_kernel<T, 32>, kGroupThreads / 32);
  }
  run(group_quant_any_kernel<T>, kGroupThreads / 32);
}

}  // namespace flashinfer::cuda
