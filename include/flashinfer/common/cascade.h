// Merges of attention states: parameters of the kernels.
//
// A state has the output v of attention over a set of keys and its lse s, the base-2 logarithm of the sum of
// 2^logit. Two disjoint sets merge to s = log2(2^s_a + 2^s_b) and v = v_a 2^(s_a - s) + v_b 2^(s_b - s). An
// empty set has s = -inf and an undefined v.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>

#include <cstdint>

namespace flashinfer {

// v [seq, heads, dim] with a contiguous last dimension, and s [seq, heads]. Strides count elements.
struct States {
  void* v;
  float* s;
  int64_t v_seq, v_head, s_seq, s_head;

  template <typename T>
  FLASHINFER_HD T* row(int64_t seq, int64_t head) const {
    return static_cast<T*>(v) + seq * v_seq + head * v_head;
  }
  FLASHINFER_HD float* lse(int64_t seq, int64_t head) const { return s + seq * s_seq + head * s_head; }
};

struct MergeStateParams {
  States a, b, out;     // `out` may be `a`
  const uint8_t* mask;  // [seq] or null; a zero leaves the row unchanged
  int64_t seq_len, num_heads, head_dim;
  DType dtype;
};

struct MergeStatesParams {
  States in, out;
  int64_t v_state, s_state;  // strides between the states of `in`
  int64_t num_states, seq_len, num_heads, head_dim;
  DType dtype;
};

struct Launch;
void merge_state(const MergeStateParams& params, const Launch& launch);
void merge_states(const MergeStatesParams& params, const Launch& launch);

}  // namespace flashinfer
