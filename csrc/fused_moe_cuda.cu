// Mixture of experts on CUDA, for the element types of this module.
#include <flashinfer/cuda/moe/activate.cuh>
#include <flashinfer/cuda/moe/finalize.cuh>
#include <flashinfer/cuda/moe/route.cuh>
#include <flashinfer/cuda/moe/sort.cuh>

#include "fused_moe_config.h"

namespace flashinfer {

int64_t sort_workspace(int64_t slots, int experts) {
  return slots <= cuda::kSmallSort ? 0 : cuda::sort_ranges(slots) * (experts + 1);
}
void route(const RouteParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::route<T>(params, where))
}
void sort_slots(const SortParams& params, const Launch& where) { cuda::sort_slots(params, where); }
void activate_rows(const ActivateParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::activate_rows<T>(params, where))
}
void finalize(const FinalizeParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::finalize<T>(params, where))
}

}  // namespace flashinfer
