// The CUDA kernels of Mamba's step for the element types of this module.
#include <flashinfer/cuda/mamba.cuh>

#include "mamba_config.h"

namespace flashinfer {

void selective_state_update(const StateUpdateParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::selective_state_update<T>(params, where))
}

}  // namespace flashinfer
