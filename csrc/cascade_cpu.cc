// Merges of attention states on the CPU, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/cascade.h>

#include "cascade_config.h"

namespace flashinfer {

void merge_state(const MergeStateParams& params, const Launch&) {
  DISPATCH_dtype(params.dtype, T, cpu::merge_state<T>(params))
}

void merge_states(const MergeStatesParams& params, const Launch&) {
  DISPATCH_dtype(params.dtype, T, cpu::merge_states<T>(params))
}

}  // namespace flashinfer
