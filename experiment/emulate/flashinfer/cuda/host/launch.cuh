#pragma once
#include <flashinfer/common/launch.h>
#include "machine.h"

inline int emu_seed = 1, emu_blocks = 3;
namespace flashinfer::cuda {
struct DeviceInfo { int major, num_sms; };
inline DeviceInfo device_info(int) { return {9, emu_blocks}; }
template <typename... P, typename... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 threads, size_t bytes, const Launch&, A&&... args) {
  if (grid.x == 0 || grid.y == 0) return;
  emu::run({grid.x, grid.y}, {threads.x}, bytes, emu_seed, kernel, P(args)...);
}
}
