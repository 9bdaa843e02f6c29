// Reads of gmem with a policy for the L2 cache (sm_80).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashinfer::cuda::ptx {

// Return the normal policy if the data is read `again`, otherwise evict-first.
__device__ __forceinline__ uint64_t read_policy(bool again) {
  uint64_t first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return again ? normal : first;
}

// Load memory that no thread writes while the kernel runs.
__device__ __forceinline__ uint4 load_global(const uint4* from, bool again) {
  uint4 value;
  asm volatile("ld.global.nc.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(__cvta_generic_to_global(from)), "l"(read_policy(again)));
  return value;
}
__device__ __forceinline__ uint2 load_global(const uint2* from, bool again) {
  uint2 value;
  asm volatile("ld.global.nc.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;"
               : "=r"(value.x), "=r"(value.y)
               : "l"(__cvta_generic_to_global(from)), "l"(read_policy(again)));
  return value;
}

// Prefetch the line of an address to the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}

}  // namespace flashinfer::cuda::ptx
