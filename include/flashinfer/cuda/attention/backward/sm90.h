// Attention's gradients on Hopper by element type: each has a file of its own, so that they compile side by side.
#pragma once

#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/common/launch.h>

namespace flashinfer::cuda {

// As prefill_backward_plan(), with on_hopper set where they serve; negative where they do not.
int64_t plan_hopper_backward_float16(PrefillBackwardParams& params, const Launch& where);
int64_t plan_hopper_backward_bfloat16(PrefillBackwardParams& params, const Launch& where);

// Of a plan that set on_hopper.
void hopper_backward_float16(const PrefillBackwardParams& params, const Launch& where);
void hopper_backward_bfloat16(const PrefillBackwardParams& params, const Launch& where);

}  // namespace flashinfer::cuda
