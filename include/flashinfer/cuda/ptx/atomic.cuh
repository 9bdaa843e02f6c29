// Atomic operations that order what threads of other blocks see.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

// Adds 1, or goes back to 0 from `last`; returns what was there. What this thread knows of before is seen by whoever
// gets a later number, and what they knew of by this thread.
__device__ __forceinline__ uint32_t atomic_inc_acq_rel(uint32_t* counter, uint32_t last) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter)), "r"(last)
               : "memory");
  return before;
}

}  // namespace flashinfer::cuda::ptx
