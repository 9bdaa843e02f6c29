// A scalar argument: a number, or the element of a tensor.
#pragma once

#include <flashinfer/common/rows.h>

namespace flashinfer {

// Graphs that serve many values read the number from a tensor on the device. The host never reads it.
struct Scalar {
  double value;
  const double* at;  // null: `value` is the number

  FLASHINFER_HD double get() const { return at ? *at : value; }
};

}  // namespace flashinfer
