// Atomic operations that order memory accesses between CTAs.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

// Add 1, or resets from `last` to 0. Return the previous value. Writes before the call are visible to every
// thread that gets a later number. The order is transitive: it includes writes that this thread has seen that
// way.
__device__ __forceinline__ uint32_t atomic_inc_acq_rel(uint32_t* counter, uint32_t last) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter)), "r"(last)
               : "memory");
  return before;
}

// Make earlier writes of this thread visible to threads that read the value with load_acquire().
__device__ __forceinline__ void store_release(uint32_t* to, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
  return value;
}

}  // namespace flashinfer::cuda::ptx
