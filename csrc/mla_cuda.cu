// Portable CUDA kernels of the mla family for one element type of this module and one of the cache.
#include <flashinfer/cuda/mla/sm80.cuh>

#include "mla_config.h"

namespace flashinfer {

template <>
WorkLimits mla_limits<FLASHINFER_PART>(int64_t, int32_t, int device) {
  return cuda::sm80::mla_limits(device);
}

template <>
void mla<FLASHINFER_PART, PROFILER>(const Profiled<MlaParams, PROFILER>& params, const Launch& where) {
  cuda::sm80::mla<T, KV, SCALED>(params, where);
}

}  // namespace flashinfer
