// Attention's gradients on sm_90a by element type. Each type has its own file, so that they compile in
// parallel.
#pragma once

#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/common/launch.h>

namespace flashinfer::cuda {

// Does the work of prefill_backward_plan() and sets on_hopper, or returns a negative number if the kernels do
// not apply.
int64_t plan_hopper_backward_float16(PrefillBackwardParams& params, const Launch& where);
int64_t plan_hopper_backward_bfloat16(PrefillBackwardParams& params, const Launch& where);

// Launches the kernels of a plan that set on_hopper.
void hopper_backward_float16(const PrefillBackwardParams& params, const Launch& where);
void hopper_backward_bfloat16(const PrefillBackwardParams& params, const Launch& where);

}  // namespace flashinfer::cuda
