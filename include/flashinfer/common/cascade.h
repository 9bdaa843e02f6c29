// Merging attention states: parameters shared by the binding and by the kernels of every backend.
//
// A state is the output v of attention over some keys and s, the base-2 logarithm of the sum of 2^logit over them
// (lse). Over both of two disjoint sets of keys, s = log2(2^s_a + 2^s_b) and v = v_a 2^(s_a - s) + v_b 2^(s_b - s).
// No keys at all are s = -inf; the v of such a state means nothing.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>

#include <cstdint>

namespace flashinfer {

// v [seq, heads, dim] with a contiguous last dimension and s [seq, heads]; strides in elements.
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
  const uint8_t* mask;  // [seq] or null; rows with 0 stay as they are
  int64_t seq_len, num_heads, head_dim;
  DType dtype;
};

struct MergeStatesParams {
  States in, out;
  int64_t v_state, s_state;  // strides from one state of `in` to the next
  int64_t num_states, seq_len, num_heads, head_dim;
  DType dtype;
};

struct Launch;
void merge_state(const MergeStateParams& params, const Launch& launch);
void merge_states(const MergeStatesParams& params, const Launch& launch);

}  // namespace flashinfer
