// Vectors of elements that move through memory as one access, and arithmetic on them in float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace flashinfer {

using half_t = __half;
using bfloat16_t = __nv_bfloat16;

namespace cuda {

constexpr int kVecBytes = 16;  // the widest access of a thread

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(half_t value) { return __half2float(value); }
__device__ __forceinline__ float to_float(bfloat16_t value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ half_t from_float<half_t>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ bfloat16_t from_float<bfloat16_t>(float value) {
  return __float2bfloat16_rn(value);
}

// N elements, aligned so that the compiler moves them in one access.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T at[N];

  __device__ __forceinline__ void to_floats(float (&out)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(at[i]);
  }

  __device__ __forceinline__ static Vec from_floats(const float (&in)[N]) {
    Vec vec;
#pragma unroll
    for (int i = 0; i < N; ++i) vec.at[i] = from_float<T>(in[i]);
    return vec;
  }
};

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_vec(const T* from) {
  return *reinterpret_cast<const Vec<T, N>*>(from);
}

// Registers of a vector's size.
template <int kBytes>
struct RawVec;
template <>
struct RawVec<16> {
  using Type = uint4;
};
template <>
struct RawVec<8> {
  using Type = uint2;
};
template <>
struct RawVec<4> {
  using Type = unsigned int;
};
template <>
struct RawVec<2> {
  using Type = unsigned short;
};

// To global memory. Assigned as a struct, a Vec may be taken apart and stored element by element (nvcc 13.0 does so in
// some kernels, whatever the struct's alignment); the intrinsic is one instruction always.
template <typename T, int N>
__device__ __forceinline__ void store_vec(T* to, const Vec<T, N>& vec) {
  using Raw = typename RawVec<sizeof(T) * N>::Type;
  Raw raw;
  memcpy(&raw, &vec, sizeof(raw));
  __stwb(reinterpret_cast<Raw*>(to), raw);
}

// Elements per widest access that a pointer and every given stride (in elements) allow: the full width or one.
template <typename T, typename... Strides>
inline bool fits_vectors(std::initializer_list<const void*> pointers, Strides... strides) {
  constexpr int64_t kElements = kVecBytes / sizeof(T);
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % kVecBytes != 0) return false;
  }
  return ((strides % kElements == 0) && ...);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
  return value;
}

}  // namespace cuda
}  // namespace flashinfer
