// The scale of a quantisation: a number, or the element of a tensor.
#pragma once

#include <flashinfer/common/scalar.h>

namespace flashinfer {

// Models keep scales in float32, graphs pass numbers in float64. The host never reads either.
struct QuantScale {
  Scalar number;
  const float* at;  // null: `number`

  FLASHINFER_HD double get() const { return at ? static_cast<double>(*at) : number.get(); }
  FLASHINFER_HD float get_float() const { return at ? *at : static_cast<float>(number.get()); }
};

}  // namespace flashinfer
