// Gradients of attention: parameters shared by the binding and by the kernels of every backend.
#pragma once

#include <flashinfer/attention/params.h>

namespace flashinfer {

// A tensor of [tokens, heads, head_dim] in any layout, strides in elements.
struct HeadRows {
  void* data;
  int64_t row, head;

  template <typename T>
  T* at(int64_t token, int64_t head_idx) const {
    return static_cast<T*>(data) + token * row + head_idx * head;
  }
};

// Of out = softmax(logits) v and lse = log2 sum 2^(logit * log2 e), given grad = dL/dout and grad_lse = dL/dlse:
//   weight = 2^(logit * log2 e - lse)
//   dL/dv = weight^T grad
//   dL/dlogit = weight * (grad v^T - delta),  delta = sum of grad * out along the head - grad_lse * log2 e
// from which the gradients of q and k follow as those of sm_scale * q k^T, bent by the soft cap's derivative.
struct PrefillBackwardParams {
  HeadRows q, k, v, grad, dq, dk, dv;
  const float *delta, *lse;            // [tokens, num_qo_heads] contiguous
  const int32_t *qo_indptr, *kv_lens;  // [batch_size + 1] and [batch_size]; null: one request
  int64_t batch_size, tokens, kv_tokens;
  const uint8_t* custom_mask;  // of all requests, each padded to whole bytes
  const float* alibi_slopes;   // [num_qo_heads], null: none
  int32_t num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo;
  MaskMode mask_mode;
  int32_t window_left;
  float logits_soft_cap, sm_scale;  // no cap: 0
  int32_t splits;                   // of a request's keys, see below
  float* partial_dq;                // [splits, tokens * num_qo_heads, head_dim_qk]
  DType dtype;                      // of q, k, v, grad and the results
};

struct Launch;

// Into how many parts the keys of a request are split at most. It follows from shapes alone: sums are in the same order
// in every run, whatever the number of threads.
int32_t prefill_backward_splits(const PrefillBackwardParams& params);

void prefill_backward(const PrefillBackwardParams& params, const Launch& launch);

}  // namespace flashinfer
