// CPU kernels of attention's gradients for the element types of this module.
#include <cstring>

#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/attention/backward.h>

#include "prefill_backward_config.h"

namespace flashinfer {

int64_t prefill_backward_plan(PrefillBackwardParams& params, const Launch&) {
  params.splits = cpu::prefill_backward_splits(params);
  return int64_t{4} * params.splits * params.tokens * params.num_qo_heads * params.head_dim_qk;
}

void prefill_backward_clear(void* gradient, int64_t bytes, const Launch&) { std::memset(gradient, 0, bytes); }

void prefill_backward(const PrefillBackwardParams& params, const Launch&) {
  DISPATCH_dtype(params.dtype, T, cpu::prefill_backward<T>(params))
}

}  // namespace flashinfer
