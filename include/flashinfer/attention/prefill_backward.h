// Gradients of attention: parameters shared by the binding and by the kernels of every backend.
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

// Of out = softmax(logits) v and lse = log2 sum 2^(logit * log2 e), given grad = dL/dout and grad_lse = dL/dlse:
//   weight = 2^(logit * log2 e - lse)
//   dL/dv = weight^T grad
//   dL/dlogit = weight * (grad v^T - delta),  delta = sum of grad * out along the head - grad_lse * log2 e
// from which the gradients of q and k follow as those of sm_scale * q k^T, times the soft cap's derivative.
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
  float logits_soft_cap, sm_scale;  // no cap: 0
  int32_t splits;                   // see below
  float* memory;                    // as many bytes as prefill_backward_plan() wants
  float* sums;                      // in memory: parts of keys' gradients where splits are more than one
  DType dtype;                      // of q, k, v, out, grad and the results
  bool on_hopper;                   // whether the kernels are those for Hopper alone; the plan says so
};

struct Launch;

// Sets `splits`, into how many parts at most work is split whose results are added up, and `on_hopper`; returns the
// bytes of `memory`. It follows from shapes and the device alone: sums are in the same order in every run, whatever the
// number of threads.
int64_t prefill_backward_plan(PrefillBackwardParams& params, const Launch& where);

// Sets a gradient to zero, on the stream where there is one.
void prefill_backward_clear(void* gradient, int64_t bytes, const Launch& where);

void prefill_backward(const PrefillBackwardParams& params, const Launch& where);

}  // namespace flashinfer
