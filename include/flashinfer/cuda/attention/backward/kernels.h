// Kernels of attention's gradients for one arch, which a file of csrc/prefill_backward/ registers.
#pragma once

#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/common/launch.h>
#include <flashinfer/common/registered.h>

namespace flashinfer::cuda {

// The kernels of one arch and element type. All kernels are in one module, because alignment and sizes of
// each call select one.
struct BackwardKernels {
  int32_t arch;  // 90 for 9.0a
  DType dtype;
  // Do the work of prefill_backward_plan(), or return a negative number if the kernels do not apply.
  int64_t (*plan)(PrefillBackwardParams&, const Launch&);
  void (*run)(const PrefillBackwardParams&, const Launch&);
};

}  // namespace flashinfer::cuda
