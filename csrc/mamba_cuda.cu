// CUDA kernels of Mamba's step. Each element type is a part of this file.
#include <flashinfer/cuda/mamba.cuh>

#include "mamba_config.h"

namespace flashinfer {

template <int kPart>
void state_update_part(const StateUpdateParams& params, const Launch& where);

template <>
void state_update_part<FLASHINFER_PART>(const StateUpdateParams& params, const Launch& where) {
  cuda::selective_state_update<T>(params, where);
}

#if FLASHINFER_PART == 0

void selective_state_update(const StateUpdateParams& params, const Launch& where) {
  call_row("dtype", kParts, params.dtype, kDtypeText, [&](auto number) { state_update_part<number>(params, where); });
}

#endif

}  // namespace flashinfer
