// The gated delta rule: parameters shared by the binding and by the kernels of every backend.
//
// Of a sequence and a value head, with a state S of [K x V], decays a = exp(g + gk) of its rows, and s the scale:
//   S~ = a S;  r = v - S~' k;  u = beta r;  S = S~ + k u';  o = s S' q
// The decay comes before the prediction S~' k, the output after the update.
#pragma once

#include <cstdint>

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/indices.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/common/scalar.h>

namespace flashinfer {

// Strides of [B, T, heads, n] in elements; the last dimension is contiguous.
struct TokenStrides {
  int64_t batch, token, head;

  FLASHINFER_HD int64_t at(int64_t b, int64_t t, int64_t h) const { return b * batch + t * token + h * head; }
};

// What q, k and v are, and what each token does to the state. Numbers "of the state" are float, double beside double.
struct DeltaRuleInputs {
  const void* q;     // [B, T, H, K]
  const void* k;     // [B, T, H, K]
  const void* v;     // [B, T, HV, V]; value head h reads head h / (HV / H) of q and k
  const void* g;     // [B, T, HV] of the state, natural logarithm; null: no decay
  const void* gk;    // [B, T, HV, K] of the state, one for each row; null: none
  const void* beta;  // [B, T, HV] of the state, or [B, T, HV, V]; null: 1
  bool beta_is_vector;
  TokenStrides q_strides, k_strides, v_strides;
  int64_t batch_size, num_tokens, num_heads, num_value_heads, key_dim, value_dim;
  Indices cu_seqlens;     // [num_sequences + 1], of one batch; null: each batch is a sequence
  int64_t num_sequences;  // B, or one less than cu_seqlens has
  Scalar scale;
  bool l2norm;   // q and k are divided by sqrt(sum x^2 + 1e-6)
  bool v_first;  // states are [.., V, K], else [.., K, V]
  bool chunked;  // operands of products may be rounded to q's type
  DType dtype;   // of q, k, v and o

  FLASHINFER_HD int64_t group() const { return num_value_heads / num_heads; }
  FLASHINFER_HD int64_t state_size() const { return key_dim * value_dim; }
  // Where a row's elements of one column lie behind each other, and a column's of one row.
  FLASHINFER_HD int64_t row_stride() const { return v_first ? 1 : value_dim; }
  FLASHINFER_HD int64_t column_stride() const { return v_first ? key_dim : 1; }
};

// Tokens [begin, end) of a batch. Values of cu_seqlens are clamped: wrong ones give wrong numbers and no wild access.
struct Sequence {
  int64_t batch, begin, end;
};

FLASHINFER_HD Sequence sequence_of(const DeltaRuleInputs& in, int64_t n) {
  if (!in.cu_seqlens.data) return {n, 0, in.num_tokens};
  const int64_t first = in.cu_seqlens[n], last = in.cu_seqlens[n + 1], most = in.num_tokens;
  const int64_t begin = first < 0 ? 0 : first > most ? most : first;
  return {0, begin, last < begin ? begin : last > most ? most : last};
}

struct DeltaRuleParams {
  DeltaRuleInputs in;
  // A step may compute its gates from raw numbers: g is -exp(A_log[h]) softplus(g + dt_bias[h]), or with a lower bound
  // bound * sigmoid(exp(A_log[h]) (g + dt_bias[h])). `raw_rows`: gk is raw, with dt_bias[h, d], and there is no g. beta
  // is sigmoid(beta), times 2 where eigenvalues may be negative. Null or 0: g, gk and beta are final.
  const float* a_log;    // [HV]
  const float* dt_bias;  // [HV], or [HV, K] of rows; null: 0
  float lower_bound;     // below 0, or 0: none
  bool raw_rows;
  int beta_sigmoid;  // the factor of the sigmoid, or 0
  void* o;           // [B, T, HV, V], contiguous
  const void* initial_state;
  void* final_state;      // may be initial_state's memory
  void* snapshots;        // [B, at least T, HV, ...], the state after each token, or null
  int64_t snapshot_rows;  // its second size
  Indices slots;          // [num_sequences] where a sequence's state lies in initial_state; null: at its own number
  Indices output_slots;   // where it goes to in final_state; null: as slots. Negative ones: nothing is touched, o is 0
  int64_t num_slots;      // of both
  DType state_dtype;
  void* workspace;  // delta_rule_chunk_workspace() bytes, of calls that are no step
};

struct DeltaRuleBackwardParams {
  DeltaRuleInputs in;
  const void* grad_o;         // [B, T, HV, V], contiguous, of q's dtype; null: 0
  const void* grad_state;     // [N, HV, ...] of the state; null: 0
  const void* initial_state;  // [N, HV, ...] of the state; null: 0
  void* grad_q;               // contiguous, as the ones that follow
  void* grad_k;
  void* grad_v;
  void* grad_g;              // of the state, null: not wanted
  void* grad_gk;             // of the state, null: not wanted
  void* grad_beta;           // of the state, null: not wanted
  void* grad_initial_state;  // of the state
  void* workspace;           // delta_rule_workspace() bytes
};

struct Launch;

// Bytes that the kernels of chunks work in: 0 where the call is not theirs.
int64_t delta_rule_chunk_workspace(const DeltaRuleInputs& inputs, const Launch& launch);
// Bytes that the gradient's kernels work in.
int64_t delta_rule_workspace(const DeltaRuleBackwardParams& params, const Launch& launch);

void delta_rule(const DeltaRuleParams& params, const Launch& launch);
void delta_rule_backward(const DeltaRuleBackwardParams& params, const Launch& launch);

}  // namespace flashinfer
