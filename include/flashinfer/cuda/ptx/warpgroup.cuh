// Synchronisation of a warpgroup: four consecutive warps, the first with a number divisible by 4.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

// Call before the first wgmma of a batch, and after any other write to its registers.
__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most kPending committed groups are in flight. Each of the four warps waits for its own part.
template <int kPending>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Pin registers that a group has written or read: no use of them moves before the preceding wait.
template <int kN>
__device__ __forceinline__ void warpgroup_hold(float (&registers)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kN>
__device__ __forceinline__ void warpgroup_hold(uint32_t (&registers)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Set the registers of a thread, a multiple of 8. The kernel needs __launch_bounds__(threads, 1) and one
// if/else by role. The sum over its warpgroups must not exceed the compiled number.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Return true in one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// Call before a barrier in each thread whose generic stores to smem wgmma or TMA reads after it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The fence for gmem: between TMA copies and flags about them that threads exchange.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace flashinfer::cuda::ptx
