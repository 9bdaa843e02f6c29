// Binding of the scale family: checks of arguments and registration. The kernels are in scale_cpu.cc,
// scale_cuda.cu and scale_sm90a.cu.
#include "binding/binding.h"

#include <flashinfer/common/scale.h>

namespace flashinfer::binding {
namespace {

Tensor scaled(const Tensor& input, double factor, int64_t power) {
  const Check check("scaled");
  const View x(input, "input");
  check.floating(x);
  check.contiguous(x);
  check.wide_rows(x);
  Tensor output = empty_like(x, input);
  const View y(output, "output");
  const ScaleParams params{.input = x.data,
                           .output = y.data,
                           .count = x.numel,
                           .factor = static_cast<float>(factor),
                           .power = static_cast<int>(power),
                           .dtype = x.dtype};
  scale(params, OnDevice(x));
  return output;
}

FLASHINFER_LIBRARY(m) { m.impl("scaled", box<scaled>); }

}  // namespace
}  // namespace flashinfer::binding
