// Accesses to memory that several GPUs and the host share, at the scope of the whole system.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashinfer::cuda::ptx {

// Store four words. PTX orders nothing between them: a reader must test each.
__device__ __forceinline__ void store_relaxed_sys(void* to, const uint4& value) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ __forceinline__ void store_relaxed_sys(void* to, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(value) : "memory");
}

__device__ __forceinline__ uint4 load4_relaxed_sys(const void* from) {
  uint4 value;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return value;
}
// Orders the load before this thread's later accesses.
__device__ __forceinline__ uint4 load4_acquire_sys(const void* from) {
  uint4 value;
  asm volatile("ld.acquire.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_relaxed_sys(const void* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
  return value;
}

// Orders this thread's earlier accesses, and those it has observed, before its later ones.
__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

}  // namespace flashinfer::cuda::ptx
