// All-reduce between processes on the CPU, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/allreduce.h>

#include "allreduce_config.h"

namespace flashinfer {

void allreduce(const AllReduceParams& params, const Launch&) {
  DISPATCH_dtype(params.dtype, T, cpu::allreduce<T>(params))
}

}  // namespace flashinfer
