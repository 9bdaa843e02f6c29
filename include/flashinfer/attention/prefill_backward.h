// Parameters of attention's gradients, shared by the binding and the kernels of every backend.
#pragma once

#include <flashinfer/attention/params.h>

namespace flashinfer {

// A tensor of [tokens, heads, head_dim] in any layout, strides in elements.
struct HeadRows {
  void* data;
  int64_t row, head;

  template <typename T>
  FLASHINFER_HD T* at(int64_t token, int64_t head_idx) const {
    return static_cast<T*>(data) + token * row + head_idx * head;
  }
};

// Gradients of O = P V and lse = log2 sum 2^(S log2 e), given dO and dlse (FlashAttention-2, arXiv
// 2307.08691):
//   P  = 2^(S log2 e - lse)
//   dV = P^T dO
//   dS = P * (dO V^T - delta),   delta = rowsum(dO * O) - dlse * log2 e
//   dQ = sm_scale * dS K,   dK = sm_scale * dS^T Q
// A soft cap multiplies dS by its derivative.
struct PrefillBackwardParams {
  HeadRows q, k, v, out, grad, dq, dk, dv;
  const float *lse, *grad_lse;         // [tokens, num_qo_heads] contiguous
  const int32_t *qo_indptr, *kv_lens;  // [batch_size + 1] and [batch_size]; null: one request
  int64_t batch_size, tokens, kv_tokens;
  const uint8_t* custom_mask;  // of all requests, each padded to whole bytes
  const float* alibi_slopes;   // [num_qo_heads], null: none
  int32_t num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo;
  MaskMode mask_mode;
  int32_t window_left;
  float logits_soft_cap, sm_scale;  // logits_soft_cap: 0 without a cap
  int32_t splits;                   // set by prefill_backward_plan()
  float* memory;                    // workspace of the size that prefill_backward_plan() returns
  float* sums;                      // in `memory`: partial sums of dK and dV if splits > 1
  DType dtype;                      // of q, k, v, out, grad and the results
  int32_t arch;                     // set by the plan: the launch uses the kernels of this arch; 0: portable ones
};

struct Launch;

// Set `arch`, and `splits`, the number of partial sums that are added at the end. Return the bytes of
// `memory`. Both follow only from shapes and the device: every run adds in the same order, whatever the
// number of threads.
int64_t prefill_backward_plan(PrefillBackwardParams& params, const Launch& where);

// Set a gradient to zero, on the launch's stream if it has one.
void prefill_backward_clear(void* gradient, int64_t bytes, const Launch& where);

void prefill_backward(const PrefillBackwardParams& params, const Launch& where);

}  // namespace flashinfer
