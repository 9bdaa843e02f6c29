// The scale family's CUDA kernel for the element types of this module.
#include <flashinfer/cuda/scale.cuh>

#include "scale_config.h"

namespace flashinfer {

void scale(const ScaleParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::scale<T>(params, where))
}

}  // namespace flashinfer
