// Store the time under a predicate. A branch would diverge lanes, which wgmma does not allow.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

// words[at] = {low, clock} and at += step, if at < end.
__device__ __forceinline__ void store_clock_before(uint32_t end, uint64_t* words, uint32_t& at, uint32_t low,
                                                   uint32_t step) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b32 time;\n"
      "setp.lt.u32 p, %0, %1;\n"
      "mov.u32 time, %%clock;\n"
      "@p st.global.v2.b32 [%2], {%3, time};\n"
      "@p add.u32 %0, %0, %4;\n"
      "}\n"
      : "+r"(at)
      : "r"(end), "l"(words + at), "r"(low), "r"(step)
      : "memory");
}

}  // namespace flashinfer::cuda::ptx
