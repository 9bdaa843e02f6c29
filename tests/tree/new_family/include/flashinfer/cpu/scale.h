// Each thread scales a part of the tensor, in float32.
#pragma once

#include <flashinfer/common/scale.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/vec.h>

namespace flashinfer::cpu {

template <typename T, int kPower>
void scale(const ScaleParams& p) {
  const T* in = static_cast<const T*>(p.input);
  T* out = static_cast<T*>(p.output);
  parallel_rows(p.count, sizeof(T), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      float value = to_float(in[i]);
      for (int n = 0; n < kPower; ++n) value *= p.factor;
      out[i] = from_float<T>(value);
    }
  });
}

}  // namespace flashinfer::cpu
