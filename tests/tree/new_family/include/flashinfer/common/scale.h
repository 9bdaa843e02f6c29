// Parameters of the scale family, shared by the binding and by the kernels of every backend.
#pragma once

#include <flashinfer/common/dtype.h>

namespace flashinfer {

// output = input * factor * ... * factor, `power` times, rounded to float32 each time and to the element type
// once.
struct ScaleParams {
  const void* input;
  void* output;
  int64_t count;
  float factor;
  int power;
  DType dtype;
};

// Each backend defines this function in a file of csrc/, for the configuration of the module.
struct Launch;
void scale(const ScaleParams& params, const Launch& launch);

}  // namespace flashinfer
