// Instances of the scale family's CUDA kernel for the element types and powers of this module.
#include <flashinfer/cuda/scale.cuh>

#include "scale_config.h"

namespace flashinfer {

void scale(const ScaleParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, DISPATCH_power(params.power, POWER, cuda::scale<T, POWER>(params, where)))
}

}  // namespace flashinfer
