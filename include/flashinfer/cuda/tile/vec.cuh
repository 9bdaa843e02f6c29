// Vectors of elements that move through memory in one access.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include <flashinfer/common/rows.h>
#include <flashinfer/cuda/tile/convert.cuh>

namespace flashinfer::cuda {

constexpr int kVecBytes = 16;  // the widest access of a thread

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

// An integer type of a vector's size.
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

template <typename T, int N>
__device__ __forceinline__ auto raw_of(const Vec<T, N>& vec) {
  typename RawVec<sizeof(T) * N>::Type raw;
  memcpy(&raw, &vec, sizeof(raw));
  return raw;
}

// Stores to gmem. The compiler may split the assignment of a Vec into elements (nvcc 13.0 does in some
// kernels, whatever the alignment). The intrinsic is always one instruction.
template <typename T, int N>
__device__ __forceinline__ void store_vec(T* to, const Vec<T, N>& vec) {
  const auto raw = raw_of(vec);
  __stwb(reinterpret_cast<decltype(raw_of(vec))*>(to), raw);
}

// Load data that a kernel reads once: its lines are the first that the L2 cache evicts.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_vec_once(const T* from) {
  using Raw = typename RawVec<sizeof(T) * N>::Type;
  const Raw raw = __ldcs(reinterpret_cast<const Raw*>(from));
  Vec<T, N> vec;
  memcpy(&vec, &raw, sizeof(raw));
  return vec;
}
template <typename T, int N>
__device__ __forceinline__ void store_vec_once(T* to, const Vec<T, N>& vec) {
  const auto raw = raw_of(vec);
  __stcs(reinterpret_cast<decltype(raw_of(vec))*>(to), raw);
}

// Return true if a size or stride, in elements, keeps the widest accesses aligned. All row strides then do
// as well.
template <typename T>
inline bool keeps_vectors(int64_t elements) {
  return elements % (kVecBytes / static_cast<int64_t>(sizeof(T))) == 0;
}
template <typename T>
inline bool keeps_vectors(const Rows& rows) {
  return keeps_vectors<T>(rows.outer_stride) && keeps_vectors<T>(rows.middle_stride) &&
         keeps_vectors<T>(rows.inner_stride);
}

template <typename T, typename... Sizes>
inline bool fits_vectors(std::initializer_list<const void*> pointers, const Sizes&... sizes) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % kVecBytes != 0) return false;
  }
  return (keeps_vectors<T>(sizes) && ...);
}

}  // namespace flashinfer::cuda
