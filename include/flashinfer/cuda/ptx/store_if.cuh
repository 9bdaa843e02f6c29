// A store under a predicate: lanes do not part for it, which products of a warpgroup would not survive.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

__device__ __forceinline__ void store_if(bool wanted, uint64_t* to, uint64_t value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "@p st.global.b64 [%0], %1;\n"
      "}\n" ::"l"(to),
      "l"(value), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

}  // namespace flashinfer::cuda::ptx
