// The gated delta rule: parameters that the binding and the kernels of every backend share.
//
// DeltaNet (Yang et al. 2024, arXiv 2406.06484), Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) and,
// with a decay per channel, Kimi Delta Attention (Kimi Linear, 2025, arXiv 2510.26692).
//
// For each sequence and value head, with a state S [K x V], row decays a = exp(g + gk) and scale s:
//   S~ = a S;  r = v - S~' k;  u = beta r;  S = S~ + k u';  o = s S' q
// The decay precedes the prediction S~' k. The output uses the updated state.
#pragma once

#include <cstdint>

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/indices.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/common/scalar.h>

namespace flashinfer {

// Strides of [B, T, heads, n] in elements. The last dimension is contiguous.
struct TokenStrides {
  int64_t batch, token, head;

  FLASHINFER_HD int64_t at(int64_t b, int64_t t, int64_t h) const { return b * batch + t * token + h * head; }
};

// Tensors of a call and the options of its recurrence. "State type" is float, and double if q is double.
struct DeltaRuleInputs {
  const void* q;     // [B, T, H, K]
  const void* k;     // [B, T, H, K]
  const void* v;     // [B, T, HV, V]; value head h reads head h / (HV / H) of q and k
  const void* g;     // [B, T, HV], state type, natural logarithm; null: no decay
  const void* gk;    // [B, T, HV, K], state type, one per row; null: none
  const void* beta;  // [B, T, HV] or [B, T, HV, V], state type; null: 1
  bool beta_is_vector;
  TokenStrides q_strides, k_strides, v_strides;
  int64_t batch_size, num_tokens, num_heads, num_value_heads, key_dim, value_dim;
  Indices cu_seqlens;     // [num_sequences + 1], batch 1; null: each batch is a sequence
  int64_t num_sequences;  // B, or the length of cu_seqlens minus 1
  Scalar scale;
  bool l2norm;   // q and k are divided by sqrt(sum x^2 + 1e-6)
  bool v_first;  // states are [.., V, K] instead of [.., K, V]
  bool chunked;  // operands of products may be rounded to q's type
  DType dtype;   // of q, k, v and o

  FLASHINFER_HD int64_t group() const { return num_value_heads / num_heads; }
  FLASHINFER_HD int64_t state_size() const { return key_dim * value_dim; }
  // Distances in elements between two rows of a column, and between two columns of a row.
  FLASHINFER_HD int64_t row_stride() const { return v_first ? 1 : value_dim; }
  FLASHINFER_HD int64_t column_stride() const { return v_first ? key_dim : 1; }
};

// Tokens [begin, end) of a batch. Values of cu_seqlens are clamped: invalid ones give wrong numbers, but no
// access out of bounds.
struct Sequence {
  int64_t batch, begin, end;
};

FLASHINFER_HD Sequence sequence_of(const DeltaRuleInputs& in, int64_t n) {
  if (!in.cu_seqlens.data) return {n, 0, in.num_tokens};
  const int64_t first = in.cu_seqlens[n], last = in.cu_seqlens[n + 1], limit = in.num_tokens;
  const int64_t begin = first < 0 ? 0 : first > limit ? limit : first;
  return {0, begin, last < begin ? begin : last > limit ? limit : last};
}

struct DeltaRuleParams {
  DeltaRuleInputs in;
  // A step may compute its gates from raw values. g is -exp(A_log[h]) softplus(g + dt_bias[h]), or with a
  // lower bound, bound * sigmoid(exp(A_log[h]) (g + dt_bias[h])). With `raw_gk`, gk is raw with dt_bias[h,
  // d], and g is null. beta is sigmoid(beta), times 2 if negative eigenvalues are allowed. If a_log is null
  // and beta_sigmoid is 0, the caller has computed g, gk and beta.
  const float* a_log;    // [HV]
  const float* dt_bias;  // [HV], or [HV, K] of rows; null: 0
  float lower_bound;     // negative, or 0: none
  bool raw_gk;
  int beta_sigmoid;  // the factor of the sigmoid, or 0
  void* o;           // [B, T, HV, V], contiguous
  const void* initial_state;
  void* final_state;      // may alias initial_state
  void* snapshots;        // [B, T or more, HV, ...], the state after each token, or null
  int64_t snapshot_rows;  // second dimension of snapshots
  Indices slots;          // [num_sequences], slot of a sequence in initial_state; null: its number
  Indices output_slots;   // slot in final_state; null: as slots. Negative: no slot is touched, o is 0
  int64_t num_slots;      // of initial_state and of final_state
  int64_t slot_bytes;     // between two slots. The heads of a slot are contiguous.
  DType state_dtype;
  // [num_checkpoints, HV, ...], or null: states after every checkpoint_every-th token of a sequence, a
  // multiple of 64. Those of sequence n begin at row checkpoint_starts[n].
  void* checkpoints;
  Indices checkpoint_starts;  // [num_sequences]
  int64_t checkpoint_every, num_checkpoints;
  DType checkpoint_dtype;
  void* workspace;  // delta_rule_chunk_workspace() bytes, unused by steps

  // Return a slot of initial_state or final_state, or null if that is null.
  FLASHINFER_HD const void* initial_slot(int64_t slot) const {
    return initial_state ? static_cast<const char*>(initial_state) + slot * slot_bytes : nullptr;
  }
  FLASHINFER_HD void* final_slot(int64_t slot) const { return static_cast<char*>(final_state) + slot * slot_bytes; }
  // Return the row of the checkpoint after `count` tokens of sequence n, or -1 if none is due. Invalid rows
  // are not written.
  FLASHINFER_HD int64_t checkpoint_row(int64_t n, int64_t count) const {
    if (!checkpoints || count == 0 || count % checkpoint_every != 0) return -1;
    const int64_t start = checkpoint_starts[n], row = start + count / checkpoint_every - 1;
    return start >= 0 && row < num_checkpoints ? row : -1;
  }
};

struct DeltaRuleBackwardParams {
  DeltaRuleInputs in;
  const void* grad_o;         // [B, T, HV, V], contiguous, of q's dtype; null: 0
  const void* grad_state;     // [N, HV, ...], state type; null: 0
  const void* initial_state;  // [N, HV, ...], state type; null: 0
  void* grad_q;               // contiguous, as the next ones
  void* grad_k;
  void* grad_v;
  void* grad_g;              // state type; null: not computed
  void* grad_gk;             // state type; null: not computed
  void* grad_beta;           // state type; null: not computed
  void* grad_initial_state;  // state type
  void* workspace;           // delta_rule_workspace() bytes
};

struct Launch;

// Return the workspace of the chunk kernels in bytes, or 0 if the call does not use them.
int64_t delta_rule_chunk_workspace(const DeltaRuleInputs& inputs, const Launch& launch);
// Return the workspace of the gradient kernels in bytes.
int64_t delta_rule_workspace(const DeltaRuleBackwardParams& params, const Launch& launch);

void delta_rule(const DeltaRuleParams& params, const Launch& launch);
void delta_rule_backward(const DeltaRuleBackwardParams& params, const Launch& launch);

}  // namespace flashinfer
