// What warps need that work as a warpgroup: four consecutive ones, the first with a number divisible by 4.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

// Before the first wgmma of a batch, and after any other write to its registers.
__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most kPending committed groups are under way. Of the four warps each waits for its own part.
template <int kPending>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Registers that a group has written or read: no use of them moves in front of the wait that this comes after.
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

// Registers of a thread, a multiple of 8. The kernel needs __launch_bounds__(threads, 1) and one if/else by role, and
// the sum over its warpgroups must not pass what it was compiled for.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// True for one lane of a warp whose lanes are all here.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// Before a barrier, in each thread whose ordinary stores to shared memory wgmma or TMA reads behind it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same of global memory: between copies of TMA and what other threads are told of them, or have told.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace flashinfer::cuda::ptx
