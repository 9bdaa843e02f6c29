// CPU kernels of Mamba's step, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/mamba.h>

#include "mamba_config.h"

namespace flashinfer {

void selective_state_update(const StateUpdateParams& params, const Launch&) {
  DISPATCH_dtype(params.dtype, T, cpu::selective_state_update<T>(params))
}

}  // namespace flashinfer
