// Copies from gmem to smem that a thread starts, groups and waits for later.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

// Copy 16 bytes around the L1 cache.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Copy 16 bytes, or write 16 zeros without a read if `valid` is false. A predicate selects, because a byte
// count costs six more instructions per copy.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool valid) {
  asm volatile(
      "{\n.reg .pred none;\nsetp.eq.u32 none, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, none;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<uint32_t>(valid))
      : "memory");
}

// Copy 8 bytes, or write 8 zeros if `valid` is false.
__device__ __forceinline__ void cp_async_8(uint32_t to, const void* from, bool valid) {
  asm volatile(
      "{\n.reg .pred none;\nsetp.eq.u32 none, %2, 0;\ncp.async.ca.shared.global [%0], [%1], 8, none;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<uint32_t>(valid))
      : "memory");
}

__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Copy 4 bytes, or write 4 zeros if `valid` is false.
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from, bool valid) {
  asm volatile(
      "{\n.reg .pred none;\nsetp.eq.u32 none, %2, 0;\ncp.async.ca.shared.global [%0], [%1], 4, none;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<uint32_t>(valid))
      : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most kPending of this thread's groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashinfer::cuda::ptx
