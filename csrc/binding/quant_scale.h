// The argument of an operator that scales a quantisation.
#pragma once

#include "binding/check.h"

#include <flashinfer/common/quant_scale.h>

#include <cmath>

namespace flashinfer::binding {

// Return the operator's positive number, or the tensor of one element that replaces it.
inline QuantScale quant_scale(const Check& check, double value, const std::optional<Tensor>& tensor, const char* name,
                              const View& like) {
  if (!tensor) {
    check.that(std::isfinite(value) && value > 0, name, "got no positive number");
    return {{value, nullptr}, nullptr};
  }
  const View arg(*tensor, name);
  check.dtype(arg, {DType::kFloat32, DType::kFloat64});
  check.same_device(arg, like);
  if (arg.numel != 1) check.fail(arg, "got " + std::to_string(arg.numel) + " elements, wanted 1");
  if (arg.dtype == DType::kFloat32) return {{}, static_cast<const float*>(arg.data)};
  return {{value, static_cast<const double*>(arg.data)}, nullptr};
}

}  // namespace flashinfer::binding
