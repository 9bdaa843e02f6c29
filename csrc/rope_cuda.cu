// Rotary embedding on CUDA, for the element types of this module.
#include <flashinfer/cuda/rope.cuh>

#include "rope_config.h"

namespace flashinfer {

void rope(const RopeParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::rope<T>(params, where))
}

}  // namespace flashinfer
