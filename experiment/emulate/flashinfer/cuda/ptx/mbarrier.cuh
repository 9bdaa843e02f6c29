#pragma once
#include "machine.h"
namespace flashinfer::cuda::ptx {
inline void mbarrier_init(uint32_t b, uint32_t n) { emu::block->barriers[b] = {static_cast<int>(n), static_cast<int>(n), 0, 0}; }
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive(uint32_t b) { auto& x = emu::barrier(b); if (--x.pending < 0) { fprintf(stderr, "too many arrivals at %u\n", b); abort(); } emu::complete(x); emu::wait_until([] { return true; }, "arrive"); }
inline void mbarrier_arrive_expect_tx(uint32_t b, uint32_t bytes) { emu::barrier(b).tx += bytes; mbarrier_arrive(b); }
inline void mbarrier_wait(uint32_t b, uint32_t parity) {
  auto& x = emu::barrier(b);
  emu::wait_until([&x, parity] { return (x.phase & 1) != parity; }, "mbarrier");
}
}
