// Gradient of act(x) * y on the CPU, in one pass over memory: a row at a time per thread.
#pragma once

#include <flashinfer/common/activation_backward.h>
#include <flashinfer/cpu/activation.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/lanes.h>

namespace flashinfer::cpu {

template <typename T, template <typename> class Act>
void act_and_mul_backward(const ActAndMulBackwardParams& p) {
  using L = Lanes<T>;
  using V = typename L::V;
  using Function = Act<VectorMath<V, typename L::S>>;
  constexpr int64_t kPiece = 4096;
  const int64_t n = p.out_size, pieces = (n + kPiece - 1) / kPiece;
  const int64_t bytes = 5 * (n < kPiece ? n : kPiece) * static_cast<int64_t>(sizeof(T));
  parallel_rows(p.num_rows * pieces, bytes, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t row = item / pieces, start = item % pieces * kPiece;
      const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(row) + start;
      const T* grad = static_cast<const T*>(p.grad) + p.grad_rows.offset(row) + start;
      T* out = static_cast<T*>(p.grad_input) + 2 * n * row + start;
      for_lanes_of<L>(n - start < kPiece ? n - start : kPiece, [&](int64_t i, int count) {
        const V x = L::load(in + i, count), y = L::load(in + n + i, count), g = L::load(grad + i, count);
        L::store(out + i, Function::slope(x, g) * y, count);
        L::store(out + n + i, Function::apply(x, g), count);
      });
    }
  });
}

}  // namespace flashinfer::cpu
