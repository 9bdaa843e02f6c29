// Mixture of experts on the CPU, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/fused_moe.h>

#include "fused_moe_config.h"

namespace flashinfer {

int64_t sort_workspace(int64_t, int) { return 0; }
void route(const RouteParams& params, const Launch&) { DISPATCH_dtype(params.dtype, T, cpu::route<T>(params)) }
void sort_slots(const SortParams& params, const Launch&) { cpu::sort_slots(params); }
void activate_rows(const ActivateParams& params, const Launch&) {
  DISPATCH_dtype(params.dtype, T, cpu::activate_rows<T>(params))
}
void finalize(const FinalizeParams& params, const Launch&) { DISPATCH_dtype(params.dtype, T, cpu::finalize<T>(params)) }

}  // namespace flashinfer
