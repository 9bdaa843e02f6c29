// What the scale family computes: parameters shared by the binding and by the kernels of every backend.
#pragma once

#include <flashinfer/common/dtype.h>

namespace flashinfer {

// output = input * factor
struct ScaleParams {
  const void* input;
  void* output;
  int64_t count;
  float factor;
  DType dtype;
};

struct Launch;
void scale(const ScaleParams& params, const Launch& launch);

}  // namespace flashinfer
