// Attention's gradients on Hopper by element type: each has a file of its own, so that they compile side by side.
#pragma once

#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/common/launch.h>

namespace flashinfer::cuda {

// As prefill_backward_plan(); negative where kernels for Hopper alone do not serve.
int64_t plan_hopper_backward_float16(PrefillBackwardParams& params, const Launch& where);
int64_t plan_hopper_backward_bfloat16(PrefillBackwardParams& params, const Launch& where);

// False where they do not serve.
bool hopper_backward_float16(const PrefillBackwardParams& params, const Launch& where);
bool hopper_backward_bfloat16(const PrefillBackwardParams& params, const Launch& where);

}  // namespace flashinfer::cuda
