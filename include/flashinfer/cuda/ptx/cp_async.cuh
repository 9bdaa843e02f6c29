// Copies from global to shared memory that a thread starts and waits for later, in groups.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

// 16 bytes past the L1 cache.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same, or 16 zeros where `wanted` is false: then nothing is read. By a predicate, as a number of bytes to read
// costs six instructions beside each copy.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool wanted) {
  asm volatile(
      "{\n.reg .pred none;\nsetp.eq.u32 none, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, none;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

// 8 bytes, or 8 zeros.
__device__ __forceinline__ void cp_async_8(uint32_t to, const void* from, bool wanted) {
  asm volatile(
      "{\n.reg .pred none;\nsetp.eq.u32 none, %2, 0;\ncp.async.ca.shared.global [%0], [%1], 8, none;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashinfer::cuda::ptx
