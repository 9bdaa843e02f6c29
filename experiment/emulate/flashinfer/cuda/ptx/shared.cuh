#pragma once
#include "machine.h"
namespace flashinfer::cuda::ptx {
inline void store_shared_16(uint32_t to, uint4 v) { memcpy(emu::shared(to), &v, 16); emu::wrote(to, 16); }
inline uint2 load_shared_8(uint32_t from) { uint2 v; memcpy(&v, emu::shared(from), 8); return v; }
}
