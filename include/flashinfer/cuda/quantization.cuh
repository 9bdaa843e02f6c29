// Booleans packed into bits on CUDA. A ballot would pack 32 booleans loaded byte by byte. Here each thread
// loads eight or sixteen at once and packs eight by one product.
#pragma once

#include <cstdint>

#include <flashinfer/common/quantization.h>
#include <flashinfer/common/search.h>
#include <flashinfer/cuda/host/launch.cuh>

namespace flashinfer::cuda {

constexpr int kPackThreads = 256;
constexpr int kScanThreads = 1024;
constexpr int kLoads = 4;  // independent loads of a thread

// Load up to eight booleans from `start`. Those from `end` on count as 0; x itself ends at n.
__device__ __forceinline__ uint64_t load8(const uint8_t* x, int64_t start, int64_t end, int64_t n) {
  if (start < 0) return 0;
  if (end > n) end = n;
  const int64_t count = end - start;
  if (count <= 0) return 0;
  const uintptr_t address = reinterpret_cast<uintptr_t>(x + start), low = address & ~uintptr_t{7};
  const int shift = static_cast<int>(address & 7) * 8;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(x);
  uint64_t bytes = 0;
  if (low >= begin && low + (shift ? 16 : 8) <= begin + n) {  // whole words of x
    const uint64_t* words = reinterpret_cast<const uint64_t*>(low);
    bytes = words[0] >> shift;
    if (shift) bytes |= words[1] << (64 - shift);
    if (count < 8) bytes &= (uint64_t{1} << 8 * count) - 1;
  } else {
    for (int i = 0; i < 8 && i < count; ++i) bytes |= static_cast<uint64_t>(x[start + i]) << 8 * i;
  }
  return bytes;
}

// Each thread and load takes 16 booleans; x is aligned to 16 bytes and packed to 2.
__global__ void __launch_bounds__(kPackThreads) pack_bits_kernel(const PackParams p) {
  const int64_t first = int64_t{blockIdx.x} * kPackThreads * kLoads + threadIdx.x;
  wait_for_inputs();
  ulonglong2 pair[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t at = (first + i * kPackThreads) * 16;
    if (at + 16 <= p.n) pair[i] = *reinterpret_cast<const ulonglong2*>(p.x + at);
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t at = (first + i * kPackThreads) * 16;
    if (at + 16 <= p.n) {
      const uint32_t two = pack8(pair[i].x, p.factor) | pack8(pair[i].y, p.factor) << 8;
      *reinterpret_cast<uint16_t*>(p.packed + at / 8) = static_cast<uint16_t>(two);
    } else {
      for (int64_t rest = at; rest < p.n; rest += 8) p.packed[rest / 8] = pack8(load8(p.x, rest, p.n, p.n), p.factor);
    }
  }
  launch_dependents();
}

// Variant for an unaligned x.
__global__ void __launch_bounds__(kPackThreads) pack_bits_any_kernel(const PackParams p) {
  const int64_t first = int64_t{blockIdx.x} * kPackThreads * kLoads + threadIdx.x;
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t byte = first + i * kPackThreads;
    if (byte < p.num_bytes) p.packed[byte] = pack8(load8(p.x, byte * 8, p.n, p.n), p.factor);
  }
  launch_dependents();
}

inline void pack_bits(const PackParams& p, const Launch& where) {
  const bool aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && reinterpret_cast<uintptr_t>(p.packed) % 2 == 0;
  const int64_t pieces = aligned ? (p.n + 15) / 16 : p.num_bytes, each = kPackThreads * kLoads;
  launch(aligned ? pack_bits_kernel : pack_bits_any_kernel, dim3((pieces + each - 1) / each), dim3(kPackThreads), where,
         p);
}

// packed_indptr[i + 1] = sum of ceil(length / 8) up to segment i, by one CTA with a segment per thread and
// round.
__global__ void __launch_bounds__(kScanThreads) packed_indptr_kernel(const SegmentPackParams p) {
  __shared__ int32_t warp_sums[kScanThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t before = 0;  // sum of the earlier rounds
  wait_for_inputs();
  if (threadIdx.x == 0) p.packed_indptr[0] = 0;
  for (int64_t start = 0; start < p.num_segments; start += kScanThreads) {
    const int64_t i = start + threadIdx.x;
    int32_t sum = 0;
    if (i < p.num_segments) {
      const int64_t length = int64_t{p.indptr[i + 1]} - p.indptr[i];
      sum = length > 0 ? static_cast<int32_t>((length + 7) / 8) : 0;
    }
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, sum, by);
      if (lane >= by) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int32_t total = before;
    for (int w = 0; w < kScanThreads / 32; ++w) {
      if (w < warp) sum += warp_sums[w];
      total += warp_sums[w];
    }
    if (i < p.num_segments) p.packed_indptr[i + 1] = before + sum;
    before = total;
    __syncthreads();  // warp_sums is overwritten next
  }
  launch_dependents();
}

// Return the segment of a packed byte among segments [low, high).
__device__ __forceinline__ int64_t segment_of(const int32_t* packed_indptr, int64_t byte, int64_t low, int64_t high) {
  return last_at_or_before(low, high, byte, [&](int64_t segment) { return packed_indptr[segment]; });
}

__global__ void __launch_bounds__(kPackThreads) segment_pack_bits_kernel(const SegmentPackParams p) {
  __shared__ int64_t ends[2];  // segments of the CTA's first and last byte, often equal
  const int64_t begin = int64_t{blockIdx.x} * kPackThreads * kLoads;
  wait_for_inputs();
  const int64_t total = p.packed_indptr[p.num_segments],
                num_bytes = total < p.pack.num_bytes ? total : p.pack.num_bytes;
  if (threadIdx.x < 2) {
    const int64_t end = begin + kPackThreads * kLoads;
    const int64_t byte = threadIdx.x == 0 ? begin : (end < num_bytes ? end : num_bytes) - 1;
    ends[threadIdx.x] = segment_of(p.packed_indptr, byte, 0, p.num_segments);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t byte = begin + i * kPackThreads + threadIdx.x;
    if (byte >= p.pack.num_bytes) continue;
    if (byte >= num_bytes) {
      p.pack.packed[byte] = 0;
      continue;
    }
    const int64_t segment = segment_of(p.packed_indptr, byte, ends[0], ends[1] + 1);
    const int64_t start = p.indptr[segment] + (byte - p.packed_indptr[segment]) * 8;
    p.pack.packed[byte] = pack8(load8(p.pack.x, start, p.indptr[segment + 1], p.pack.n), p.pack.factor);
  }
  launch_dependents();
}

inline void segment_pack_bits(const SegmentPackParams& p, const Launch& where) {
  launch(packed_indptr_kernel, dim3(1), dim3(kScanThreads), where, p);
  const int64_t each = kPackThreads * kLoads;
  launch(segment_pack_bits_kernel, dim3((p.pack.num_bytes + each - 1) / each), dim3(kPackThreads), where, p);
}

}  // namespace flashinfer::cuda
