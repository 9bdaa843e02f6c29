// A number that the caller gives as one, or as the element of a tensor.
#pragma once

#include <flashinfer/common/rows.h>

namespace flashinfer {

// A graph that is compiled once for many values, or replayed with new ones, has the number in a tensor: it is read
// where the kernel runs, never on the host.
struct Scalar {
  double value;
  const double* at;  // null where `value` is the number

  FLASHINFER_HD double get() const { return at ? *at : value; }
};

}  // namespace flashinfer
