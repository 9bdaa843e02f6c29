// CPU version of the instructions in cuda/ptx/store_clock.cuh.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/ptx/timer.cuh>

namespace flashinfer::cuda::ptx {

inline void store_clock_before(uint32_t end, uint64_t* words, uint32_t& at, uint32_t low, uint32_t step) {
  if (at >= end) return;
  words[at] = low | static_cast<uint64_t>(clock_low()) << 32;
  at += step;
}

}  // namespace flashinfer::cuda::ptx
