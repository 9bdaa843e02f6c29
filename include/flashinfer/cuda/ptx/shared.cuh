// Accesses to smem by its 32-bit address, which copies and matrix instructions take.
//
// One rule of order for this folder: instructions that write memory clobber "memory", and so do barriers and
// waits. Loads of operands in mainloops (ldmatrix, load_shared_float) do not, so that the compiler keeps
// values in registers across them. They stay in order with all other volatile assembly, but not with plain
// C++ accesses: a plain store and such a load of the same address need a barrier or a wait between them.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t to, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// Adds in one thread. For atomicAdd, the compiler first determines the active lanes.
__device__ __forceinline__ uint32_t atomic_add_shared(uint32_t to, uint32_t value) {
  uint32_t before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(to), "r"(value) : "memory");
  return before;
}

__device__ __forceinline__ float load_shared_float(uint32_t from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from));
  return value;
}

__device__ __forceinline__ uint32_t load_shared(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t from) {
  uint2 value;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

}  // namespace flashinfer::cuda::ptx
