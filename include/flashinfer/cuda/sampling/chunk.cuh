// A chunk of a row in the registers of a warp: its elements, and their sum in the order of
// common/fixed_sum.h.
//
// Lane l has the elements j * 128 + l * 4 + c of a chunk as at[j][c]: four 16-byte accesses to a row of
// floats.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include <flashinfer/common/sampling.h>
#include <flashinfer/cuda/ptx/policy.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

struct Chunk {
  float at[4][4];

  template <typename F>
  __device__ __forceinline__ void for_each(const F& f) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) f(at[j][c]);
    }
  }
};

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }

// Inclusive prefix sums over the lanes, for kN numbers at once.
template <int kN>
__device__ __forceinline__ void warp_inclusive_sum(const uint64_t (&values)[kN], uint64_t (&ends)[kN]) {
  const int lane = lane_id();
#pragma unroll
  for (int i = 0; i < kN; ++i) ends[i] = values[i];
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const uint64_t other = __shfl_up_sync(kAllLanes, ends[i], apart);
      if (lane >= apart) ends[i] += other;
    }
  }
}
__device__ __forceinline__ uint64_t warp_inclusive_sum(uint64_t value) {
  const uint64_t values[1] = {value};
  uint64_t ends[1];
  warp_inclusive_sum(values, ends);
  return ends[0];
}

// Return the offset of a lane's elements in part j of a chunk.
__device__ __forceinline__ int part_start(int j) { return j * 128 + lane_id() * 4; }

// Return the larger number, or NaN if one is NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

template <typename F>
__device__ __forceinline__ float chunk_sum(const Chunk& x, const F& value) {
  const int lane = lane_id();
  float s[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) s[c] = (value(x.at[0][c]) + value(x.at[2][c])) + (value(x.at[1][c]) + value(x.at[3][c]));
  // Elements 64 and 32 apart are in lanes 16 and 8 apart. Adding them reduce-scatters the columns: a lane
  // then has one. Next come elements 16, 8 and 4 apart. Last come the columns 2 and 1 apart, which lie in
  // lanes 16 and 8 apart.
  const bool high = lane & 16, keeps_odd_column = lane & 8;
  const float a = (high ? s[2] : s[0]) + __shfl_xor_sync(kAllLanes, high ? s[0] : s[2], 16);
  const float b = (high ? s[3] : s[1]) + __shfl_xor_sync(kAllLanes, high ? s[1] : s[3], 16);
  float sum = (keeps_odd_column ? b : a) + __shfl_xor_sync(kAllLanes, keeps_odd_column ? a : b, 8);
#pragma unroll
  for (int apart : {4, 2, 1, 16, 8}) sum += __shfl_xor_sync(kAllLanes, sum, apart);
  return sum;
}

__device__ __forceinline__ float chunk_sum(const Chunk& x) {
  return chunk_sum(x, [](float value) { return value; });
}

// Sums of a lane's elements of a chunk: at[c] of lane l sums the four elements l * 4 + c + 128 j.
struct Sums {
  float at[4];
};
template <typename F>
__device__ __forceinline__ Sums first_sums(const Chunk& x, const F& value) {
  Sums s;
#pragma unroll
  for (int c = 0; c < 4; ++c)
    s.at[c] = (value(x.at[0][c]) + value(x.at[2][c])) + (value(x.at[1][c]) + value(x.at[3][c]));
  return s;
}

// Return the sum of one of two chunks from first_sums() of both: of the first chunk in lanes below 16, of the
// second in the others.
__device__ __forceinline__ float pair_sum(const Sums& first, const Sums& second) {
  const int lane = lane_id();
  const bool high = lane & 16, eight = lane & 8, four = lane & 4;
  float k[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float a = first.at[c], b = second.at[c];
    k[c] = (high ? b : a) + __shfl_xor_sync(kAllLanes, high ? a : b, 16);
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) k[c] = (eight ? k[c + 2] : k[c]) + __shfl_xor_sync(kAllLanes, eight ? k[c] : k[c + 2], 8);
  float sum = (four ? k[1] : k[0]) + __shfl_xor_sync(kAllLanes, four ? k[0] : k[1], 4);
#pragma unroll
  for (int apart : {2, 1, 8, 4}) sum += __shfl_xor_sync(kAllLanes, sum, apart);
  return sum;
}

// The same from the chunks. It takes fewer steps than two calls of chunk_sum().
template <typename F>
__device__ __forceinline__ float pair_sum(const Chunk& first, const Chunk& second, const F& value) {
  return pair_sum(first_sums(first, value), first_sums(second, value));
}

// Return the larger number. If one argument is NaN, return NaN with kNaN, else the other argument.
template <bool kNaN>
__device__ __forceinline__ float larger(float a, float b) {
  return kNaN ? max_nan(a, b) : fmaxf(a, b);
}

template <bool kNaN>
__device__ __forceinline__ float lane_max(const Chunk& x) {
  float maximum = x.at[0][0];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) maximum = larger<kNaN>(maximum, x.at[j][c]);
  }
  return maximum;
}

template <bool kNaN>
__device__ __forceinline__ float chunk_max(const Chunk& x) {
  float maximum = lane_max<kNaN>(x);
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2)
    maximum = larger<kNaN>(maximum, __shfl_xor_sync(kAllLanes, maximum, apart));
  return maximum;
}

template <bool kNaN>
__device__ __forceinline__ float pair_max(const Chunk& first, const Chunk& second) {
  const bool high = lane_id() & 16;
  const float a = lane_max<kNaN>(first), b = lane_max<kNaN>(second);
  float maximum = larger<kNaN>(high ? b : a, __shfl_xor_sync(kAllLanes, high ? a : b, 16));
#pragma unroll
  for (int apart = 8; apart > 0; apart /= 2)
    maximum = larger<kNaN>(maximum, __shfl_xor_sync(kAllLanes, maximum, apart));
  return maximum;
}

// Return the size in bytes of an element of a row.
__device__ __forceinline__ int size_of_row_type(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Load with ld.global, because the compiler loses the address space of pointers in structs. `reread` sets an
// L2 hint that keeps the line longer.
template <typename T>
__device__ __forceinline__ Vec<T, 4> read4(const T* from, bool reread) {
  using Raw = typename RawVec<4 * sizeof(T)>::Type;
  const Raw raw = ptx::load_global(reinterpret_cast<const Raw*>(from), reread);
  Vec<T, 4> vec;
  memcpy(&vec, &raw, sizeof(raw));
  return vec;
}

template <typename T>
__device__ __forceinline__ T read1(const T* from) {
  using Raw = typename RawVec<sizeof(T)>::Type;
  const Raw raw = __ldg(reinterpret_cast<const Raw*>(from));
  T value;
  memcpy(&value, &raw, sizeof(raw));
  return value;
}

// A row in the caller's memory.
struct Source {
  const char* data;
  DType dtype;
  int64_t n;
  bool is_aligned;  // chunks may be loaded four elements at a time

  __device__ static Source of(const RowsOf& rows, int64_t offset, int64_t n) {
    const char* data = static_cast<const char*>(rows.data) + offset * size_of_row_type(rows.dtype);
    return {data, rows.dtype, n, reinterpret_cast<uintptr_t>(data) % (4 * size_of_row_type(rows.dtype)) == 0};
  }

  template <typename T>
  __device__ __forceinline__ void load_whole(Chunk& x, int64_t start, bool reread) const {
    const T* from = reinterpret_cast<const T*>(data) + start;
#pragma unroll
    for (int j = 0; j < 4; ++j) read4<T>(from + part_start(j), reread).to_floats(x.at[j]);
  }

  // Load chunks at the end of a row, and chunks of unaligned rows.
  __device__ __noinline__ static void load_by_elements(Chunk& x, Source source, int64_t start, float padding) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int64_t i = start + part_start(j) + c;
        x.at[j][c] = i < source.n ? source.at(i) : padding;
      }
    }
  }

  __device__ __forceinline__ void load(Chunk& x, int64_t start, float padding, bool reread = false) const {
    if (!is_aligned || start + kSumChunk > n) {
      Chunk copy;  // not x: taking the address of x would move it to local memory
      load_by_elements(copy, Source(*this), start, padding);
      x = copy;
    } else if (dtype == DType::kFloat32) {
      load_whole<float>(x, start, reread);
    } else if (dtype == DType::kFloat16) {
      load_whole<half_t>(x, start, reread);
    } else {
      load_whole<bfloat16_t>(x, start, reread);
    }
  }

  __device__ __forceinline__ float at(int64_t i) const {
    if (dtype == DType::kFloat32) return read1<float>(reinterpret_cast<const float*>(data) + i);
    return dtype == DType::kFloat16 ? to_float(read1<half_t>(reinterpret_cast<const half_t*>(data) + i))
                                    : to_float(read1<bfloat16_t>(reinterpret_cast<const bfloat16_t*>(data) + i));
  }

  // Load kCount elements from `start` on, with zeros after the end.
  template <typename T, int kCount>
  __device__ __forceinline__ void load_some(float (&x)[kCount], int64_t start) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      x[i] = start + i < n ? to_float(read1<T>(reinterpret_cast<const T*>(data) + start + i)) : 0.0f;
  }
  template <int kCount>
  __device__ __forceinline__ void load_some(float (&x)[kCount], int64_t start) const {
    if (dtype == DType::kFloat32) return load_some<float>(x, start);
    return dtype == DType::kFloat16 ? load_some<half_t>(x, start) : load_some<bfloat16_t>(x, start);
  }
};

template <typename T>
__device__ __forceinline__ void store_whole(T* to, const Chunk& x) {
#pragma unroll
  for (int j = 0; j < 4; ++j) store_vec(to + part_start(j), Vec<T, 4>::from_floats(x.at[j]));
}

template <typename T>
__device__ __noinline__ void store_by_elements(T* to, const Chunk& x, int64_t count) {
  for (int j = 0; j < 4; ++j) {
    for (int c = 0; c < 4; ++c) {
      const int i = part_start(j) + c;
      if (i < count) to[i] = from_float<T>(x.at[j][c]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_chunk(T* to, const Chunk& x, int64_t left) {
  if (reinterpret_cast<uintptr_t>(to) % (4 * sizeof(T)) == 0 && left >= kSumChunk) return store_whole(to, x);
  const Chunk copy = x;
  store_by_elements(to, copy, left);
}

// Store a chunk to a matrix with rows of n elements.
__device__ __forceinline__ void store_chunk(void* to, DType dtype, int64_t row, const Chunk& x, int64_t start,
                                            int64_t n) {
  const int64_t at = row * n + start, left = n - start;
  if (dtype == DType::kFloat32) return store_chunk(static_cast<float*>(to) + at, x, left);
  if (dtype == DType::kFloat16) return store_chunk(static_cast<half_t*>(to) + at, x, left);
  store_chunk(static_cast<bfloat16_t*>(to) + at, x, left);
}

__device__ __forceinline__ void store_element(void* to, DType dtype, int64_t at, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(to)[at] = value;
  } else if (dtype == DType::kFloat16) {
    static_cast<half_t*>(to)[at] = from_float<half_t>(value);
  } else {
    static_cast<bfloat16_t*>(to)[at] = from_float<bfloat16_t>(value);
  }
}

__device__ __forceinline__ float rounded(float x, DType dtype) {
  if (dtype == DType::kFloat16) return to_float(from_float<half_t>(x));
  return dtype == DType::kBFloat16 ? to_float(from_float<bfloat16_t>(x)) : x;
}

}  // namespace flashinfer::cuda
