// Rotary embedding with 8-bit results on CUDA, for the element types of this module.
#include <flashinfer/cuda/rope_quant.cuh>

#include "rope_quant_config.h"

namespace flashinfer {

void rope_quant(const RopeQuantParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::rope_quant<T>(params, where))
}

}  // namespace flashinfer
