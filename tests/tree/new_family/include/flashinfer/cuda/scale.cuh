// A grid-stride loop scales each element in float32.
#pragma once

#include <algorithm>

#include <flashinfer/common/scale.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

template <typename T, int kPower>
__device__ __forceinline__ T scaled(T element, float factor) {
  float value = to_float(element);
#pragma unroll
  for (int n = 0; n < kPower; ++n) value *= factor;
  return from_float<T>(value);
}

template <typename T, int kPower>
__global__ void scale_kernel(ScaleParams p) {
  wait_for_inputs();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < p.count; i += step) {
    static_cast<T*>(p.output)[i] = scaled<T, kPower>(static_cast<const T*>(p.input)[i], p.factor);
  }
  launch_dependents();
}

template <typename T, int kPower>
void scale(const ScaleParams& p, const Launch& where) {
  constexpr int kThreads = 256;
  const int64_t blocks = std::min<int64_t>((p.count + kThreads - 1) / kThreads, 65536);
  launch(scale_kernel<T, kPower>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), where, p);
}

}  // namespace flashinfer::cuda
