// The online softmax (Milakov and Gimelshein, arXiv 1805.02867) in base 2:
//   m' = max(m, rowmax S);  P = 2^(S - m');  l = l 2^(m - m') + rowsum P;  rescale = 2^(m - m')
#pragma once

#include <flashinfer/attention/math.h>
#include <flashinfer/cpu/attention/types.h>
#include <flashinfer/cpu/simd/math.h>
#include <flashinfer/cpu/simd/transpose.h>

namespace flashinfer::cpu {

// Softmax state of each row of a tile: m, l, and the factor that rescales O after m has changed.
struct SoftmaxState {
  float *m, *l, *rescale;

  SoftmaxState(Scratch& scratch, int rows)
      : m(scratch.take(rows)), l(scratch.take(rows)), rescale(scratch.take(rows)) {}

  void reset(int rows) {
    for (int row = 0; row < rows; ++row) m[row] = -math::inf, l[row] = 0, rescale[row] = 1;
  }

  struct Row {
    float &m, &l, &rescale;
  };
  Row at(int row) const { return {m[row], l[row], rescale[row]}; }
};

// Replace logits [from, to) in base 2, whole vectors, by P.
inline void softmax(float* logits, int from, int to, SoftmaxState::Row state) {
  vfloat maxima = splat(-math::inf);
  for (int i = from; i < to; i += kLanes) maxima = max(maxima, load(logits + i));
  const float block = maximum_of(maxima), m = block > state.m ? block : state.m;
  const float reference = m == -math::inf ? 0.0f : m;  // before the first visible key, all of P is 0
  vfloat sums = {};
  for (int i = from; i < to; i += kLanes) {
    const vfloat weights = exp2(load(logits + i) - reference);
    store(logits + i, weights);
    sums += weights;
  }
  state.rescale = state.m == m ? 1.0f : math::ptx_exp2(state.m - reference);
  state.l = state.l * state.rescale + total_of(sums);
  state.m = m;
}

}  // namespace flashinfer::cpu
