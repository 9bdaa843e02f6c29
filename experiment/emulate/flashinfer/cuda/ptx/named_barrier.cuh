#pragma once
#include "machine.h"
namespace flashinfer::cuda::ptx {
template <int kThreads> inline void named_barrier(int id) { emu::meet(emu::block->named[id], kThreads); }
}
