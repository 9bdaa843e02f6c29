// The CPU kernels of attention's gradients for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/prefill_backward.h>

#include "prefill_backward_config.h"

namespace flashinfer {

int32_t prefill_backward_splits(const PrefillBackwardParams& params) { return cpu::prefill_backward_splits(params); }

void prefill_backward(const PrefillBackwardParams& params, const Launch&) {
  DISPATCH_dtype(params.dtype, T, cpu::prefill_backward<T>(params))
}

}  // namespace flashinfer
