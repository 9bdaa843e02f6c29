// CPU kernels of the mla family for one element type of this module and one of the cache.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/attention/mla.h>

#include "mla_config.h"

namespace flashinfer {

template <>
WorkLimits mla_limits<FLASHINFER_PART>(int64_t rows, int32_t tile_rows, int) {
  return cpu::mla_limits(rows, tile_rows);
}

template <>
void mla<FLASHINFER_PART, PROFILER>(const Profiled<MlaParams, PROFILER>& params, const Launch&) {
  cpu::mla<T, KV>(params);
}

}  // namespace flashinfer
