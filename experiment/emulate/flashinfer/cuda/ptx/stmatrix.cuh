#pragma once
#include "machine.h"
namespace flashinfer::cuda::ptx {
inline void stmatrix_x4(uint32_t at, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  emu::block->slots[emu::warp()][emu::lane()] = at;
  emu::meet_warp();
  const uint32_t r[4] = {r0, r1, r2, r3};
  for (int j = 0; j < 4; ++j) {
    const auto to = static_cast<uint32_t>(emu::block->slots[emu::warp()][8 * j + emu::lane() / 4]) + 4 * (emu::lane() % 4);
    memcpy(emu::shared(to), &r[j], 4);
    emu::wrote(to, 4);
  }
  emu::meet_warp();
}
}
