// Collectives between processes on the CPU, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/allreduce.h>
#include <flashinfer/cpu/moe_alltoall.h>

#include "allreduce_config.h"

namespace flashinfer {

void allreduce(const AllReduceParams& params, const Launch&) {
  DISPATCH_dtype(params.dtype, T, cpu::allreduce<T>(params))
}

void reduce_scatter(const AllReduceParams& params, const Launch&) {
  DISPATCH_dtype(params.dtype, T, cpu::reduce_scatter<T>(params))
}

void all_gather(const AllReduceParams& params, const Launch&) {
  DISPATCH_dtype(params.dtype, T, cpu::all_gather<T>(params))
}

void moe_dispatch(const MoeDispatchParams& params, const Launch&) { cpu::moe_dispatch(params); }

void moe_combine(const MoeCombineParams& params, const Launch&) {
  DISPATCH_dtype(params.call.dtype, T, cpu::moe_combine<T>(params))
}

}  // namespace flashinfer
