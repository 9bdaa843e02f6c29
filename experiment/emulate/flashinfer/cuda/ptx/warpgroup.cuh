#pragma once
#include "machine.h"
namespace flashinfer::cuda::ptx {
inline void warpgroup_fence() {}
inline void warpgroup_commit() { emu::commit(); }
template <int kPending> inline void warpgroup_wait() { emu::wait_products(kPending); }
template <typename T> inline void warpgroup_hold(T&) { asm volatile("" ::: "memory"); }
template <int> inline void setmaxnreg_inc() {}
template <int> inline void setmaxnreg_dec() {}
inline bool elect_one() { return emu::lane() == 0; }
inline void fence_proxy_async() { emu::fence(); }
inline void fence_proxy_async_global() {}
}
