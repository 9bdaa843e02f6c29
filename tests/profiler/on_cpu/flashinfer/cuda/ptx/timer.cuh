// Clocks that count how often they were read, on a CPU.
#pragma once

#include <cstdint>

namespace flashinfer::cuda::ptx {

inline uint32_t clock_low() {
  static uint32_t now = 0xFFFFFF00;
  return ++now;
}
inline uint64_t globaltimer() { return 1'000'000'000'000 + clock_low(); }
inline uint32_t multiprocessor() { return 7; }

}  // namespace flashinfer::cuda::ptx
