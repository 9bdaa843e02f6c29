// Shared memory by its 32-bit address, which is what copies and matrix instructions take.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

}  // namespace flashinfer::cuda::ptx
