// Sums and maxima over the lanes of a warp, and over the threads of a row.
#pragma once

namespace flashinfer::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// Return the sum over kLanes adjacent lanes, in all of them.
template <int kLanes, typename T>
__device__ __forceinline__ T lanes_sum(T value) {
  static_assert(kLanes > 0 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "lanes are halved, 32 at most");
#pragma unroll
  for (int by = kLanes / 2; by > 0; by /= 2) value += __shfl_xor_sync(kAllLanes, value, by);
  return value;
}

template <int kLanes>
__device__ __forceinline__ float lanes_max(float value) {
#pragma unroll
  for (int by = kLanes / 2; by > 0; by /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, by));
  return value;
}

// Reduce-scatter: sum kCount values over kLanes adjacent lanes. Lane l then holds the sum of value
// l / (kLanes / kCount) in x[0].
template <int kLanes, int kCount, int kAll>
__device__ __forceinline__ void scattered_lane_sums(float (&x)[kAll]) {
  static_assert(kCount >= 1 && kCount <= kLanes && kCount <= kAll, "there is a lane for each value");
  if constexpr (kLanes > 1) {
    constexpr int kBy = kLanes / 2;
    if constexpr (kCount == 1) {
      x[0] = lanes_sum<kLanes>(x[0]);
    } else {
      const bool upper = threadIdx.x & kBy;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const float given = upper ? x[i] : x[i + kCount / 2], kept = upper ? x[i + kCount / 2] : x[i];
        x[i] = kept + __shfl_xor_sync(kAllLanes, given, kBy);
      }
      scattered_lane_sums<kBy, kCount / 2>(x);
    }
  }
}

// Return the maximum over the four lanes that have elements of the same rows of an accumulator.
__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

// Return the sum over the threads of a row. threadIdx.x counts them, a power of two, and threadIdx.y the
// rows. `partial` has 32 floats per row of the CTA, aligned to 16 bytes.
__device__ __forceinline__ float row_sum(float value, float* partial) {
  const int threads = blockDim.x;
  for (int lane = (threads < 32 ? threads : 32) / 2; lane > 0; lane /= 2)
    value += __shfl_xor_sync(kAllLanes, value, lane);
  if (threads <= 32) return value;
  const int warps = threads / 32;
  float* mine = partial + threadIdx.y * 32;
  __syncthreads();  // the previous sum may still be read
  if (threadIdx.x % 32 == 0) mine[threadIdx.x / 32] = value;
  __syncthreads();
  if (warps == 2) return mine[0] + mine[1];
  float total = 0;
#pragma unroll 2
  for (int warp = 0; warp < warps; warp += 4) {
    const auto four = *reinterpret_cast<const float4*>(mine + warp);
    total += (four.x + four.y) + (four.z + four.w);
  }
  return total;
}

}  // namespace flashinfer::cuda
