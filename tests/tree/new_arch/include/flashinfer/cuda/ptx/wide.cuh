// Accesses of 32 bytes by one thread, which GPUs have from compute capability 10.0 on. Addresses are
// multiples of 32.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

__device__ __forceinline__ void load_32_bytes(uint32_t (&to)[8], const void* from) {
  asm volatile("ld.global.v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]), "=r"(to[4]), "=r"(to[5]), "=r"(to[6]), "=r"(to[7])
               : "l"(from)
               : "memory");
}

__device__ __forceinline__ void store_32_bytes(void* to, const uint32_t (&from)[8]) {
  asm volatile("st.global.v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};"
               :
               : "l"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]), "r"(from[4]), "r"(from[5]),
                 "r"(from[6]), "r"(from[7])
               : "memory");
}

}  // namespace flashinfer::cuda::ptx
