// The online softmax: m is the highest logit so far and l the sum of weights; a block's logits become weights.
#pragma once

#include <flashinfer/attention/math.h>
#include <flashinfer/cpu/attention/types.h>
#include <flashinfer/cpu/simd/math.h>
#include <flashinfer/cpu/simd/transpose.h>

namespace flashinfer::cpu {

// How far the softmax of each row of a tile has come: m and l, and what the sums of the blocks before are to be
// multiplied by, now that m has changed.
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

// Logits in log2 of [from, to), whole vectors, become weights.
inline void softmax(float* logits, int from, int to, SoftmaxState::Row state) {
  vfloat most = splat(-math::inf);
  for (int i = from; i < to; i += kLanes) most = max(most, load(logits + i));
  const float block = maximum_of(most), m = block > state.m ? block : state.m;
  const float reference = m == -math::inf ? 0.0f : m;  // where nothing was seen yet all weights are 0
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
