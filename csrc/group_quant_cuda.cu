// Quantisation of groups on CUDA, for the element types of this module.
#include <flashinfer/cuda/group_quant.cuh>

#include "group_quant_config.h"

namespace flashinfer {

void group_quant(const GroupQuantParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::group_quant<T>(params, where))
}

}  // namespace flashinfer
