#pragma once
#include "machine.h"
namespace flashinfer::cuda::ptx {
inline void store_release(uint32_t* to, uint32_t v) { __atomic_store_n(to, v, __ATOMIC_SEQ_CST); }
inline uint32_t load_acquire(const uint32_t* from) {
  emu::wait_until([] { return true; }, "acquire");
  std::this_thread::yield();
  return __atomic_load_n(from, __ATOMIC_SEQ_CST);
}
}
