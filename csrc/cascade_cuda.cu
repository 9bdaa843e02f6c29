// Merges of attention states on CUDA, for the element types of this module.
#include <flashinfer/cuda/cascade.cuh>

#include "cascade_config.h"

namespace flashinfer {

void merge_state(const MergeStateParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::merge_state<T>(params, where))
}

void merge_states(const MergeStatesParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::merge_states<T>(params, where))
}

}  // namespace flashinfer
