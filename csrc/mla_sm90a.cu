// sm_90a kernels of the mla family for one element type of this module.
#include <flashinfer/cuda/mla/sm90.cuh>

#include "mla_config.h"

namespace flashinfer {

template <>
WorkLimits mla_limits<FLASHINFER_PART>(int64_t, int32_t, int device) {
  return cuda::sm90::mla_limits(device);
}

template <>
void mla<FLASHINFER_PART, PROFILER>(const Profiled<MlaParams, PROFILER>& params, const Launch& where) {
  cuda::sm90::mla<T>(params, where);
}

}  // namespace flashinfer
