// Checks that the operators of the delta rule share.
#pragma once

#include "binding/binding.h"

#include <flashinfer/common/delta_rule.h>

#include <optional>

namespace flashinfer::binding {

using OptionalTensor = std::optional<Tensor>;

// Type of states, gates and beta: float, and double if q is double.
inline int32_t state_type(DType dtype) {
  return dtype == DType::kFloat64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
}
inline DType state_dtype(DType dtype) { return dtype == DType::kFloat64 ? dtype : DType::kFloat32; }

// Checked q, k, v and inputs per token. Kernels take `inputs`.
struct DeltaRuleArguments {
  const Check& check;
  View q, k, v;
  DeltaRuleInputs inputs{};

  DeltaRuleArguments(const Check& check_, const Tensor& q_, const Tensor& k_, const Tensor& v_, const OptionalTensor& g,
                     const OptionalTensor& gk, const OptionalTensor& beta, const OptionalTensor& cu_seqlens,
                     double scale, const OptionalTensor& scale_tensor, bool l2norm, bool v_first, bool chunked)
      : check(check_), q(q_, "q"), k(k_, "k"), v(v_, "v") {
    for (const View* arg : {&q, &k, &v}) {
      check.rank(*arg, 4, 4);
      check.trainable(*arg);
      check.same_dtype(*arg, q);
      check.same_device(*arg, q);
      check.last_contiguous(*arg);
      check.aligned(*arg);
    }
    check.same_shape(k, q);
    check.shape(v, {q.size(0), q.size(1), -1, -1});
    inputs.batch_size = q.size(0), inputs.num_tokens = q.size(1);
    inputs.num_heads = q.size(2), inputs.key_dim = q.size(3);
    inputs.num_value_heads = v.size(2), inputs.value_dim = v.size(3);
    if (inputs.key_dim < 1 || inputs.key_dim > 256)
      check.fail(q, "got " + std::to_string(inputs.key_dim) + " elements in a head, wanted 1 to 256");
    if (inputs.value_dim < 1) check.fail(v, "got no elements in a head, wanted some");
    if (inputs.num_heads < 1 || inputs.num_value_heads < 1 || inputs.num_value_heads % inputs.num_heads != 0)
      check.fail(v, "got " + std::to_string(inputs.num_value_heads) + " heads, wanted a multiple of q's " +
                        std::to_string(inputs.num_heads));
    inputs.q = q.data;
    inputs.k = k.data;
    inputs.v = v.data;
    inputs.q_strides = strides(q);
    inputs.k_strides = strides(k);
    inputs.v_strides = strides(v);
    inputs.g = of_tokens(g, "g", -1);
    inputs.gk = of_tokens(gk, "gk", inputs.key_dim);
    inputs.beta_is_vector = beta && View(*beta, "beta").ndim == 4;
    inputs.beta = of_tokens(beta, "beta", inputs.beta_is_vector ? inputs.value_dim : -1);
    inputs.num_sequences = inputs.batch_size;
    if (cu_seqlens) take(View(*cu_seqlens, "cu_seqlens"));
    inputs.scale = check.scalar(scale, scale_tensor, "scale_tensor", q);
    inputs.l2norm = l2norm;
    inputs.v_first = v_first;
    inputs.chunked = chunked;
    inputs.dtype = q.dtype;
  }

  // Check a state: [num, HV, K, V] or [num, HV, V, K].
  void state_shape(const View& state, int64_t num) const {
    const int64_t rows = inputs.v_first ? inputs.value_dim : inputs.key_dim;
    check.shape(state, {num, inputs.num_value_heads, rows, inputs.v_first ? inputs.key_dim : inputs.value_dim});
    check.same_device(state, q);
    check.contiguous(state);
    check.aligned(state);
  }
  // Check a pool of states, in which there may be gaps between the slots.
  void slots_shape(const View& pool, int64_t num) const {
    const int64_t rows = inputs.v_first ? inputs.value_dim : inputs.key_dim;
    check.shape(pool, {num, inputs.num_value_heads, rows, inputs.v_first ? inputs.key_dim : inputs.value_dim});
    check.same_device(pool, q);
    check.aligned(pool);
    int64_t expected = 1;
    bool dense = true;
    for (int64_t dim = 3; dim > 0; expected *= pool.size(dim--))
      dense = dense && (pool.size(dim) == 1 || pool.stride(dim) == expected);
    if (pool.size(0) > 1) dense = dense && pool.stride(0) >= expected;
    if (!dense && pool.numel > 0) check.fail(pool, "is not contiguous, wanted contiguous slots that do not overlap");
  }
  const void* state(const OptionalTensor& tensor, const char* name) const {
    if (!tensor) return nullptr;
    const View arg(*tensor, name);
    check.dtype(arg, {state_dtype(q.dtype)});
    state_shape(arg, inputs.num_sequences);
    return arg.data;
  }
  Tensor new_states(int64_t num, const Tensor& like) const {
    const int64_t rows = inputs.v_first ? inputs.value_dim : inputs.key_dim;
    const int64_t sizes[] = {num, inputs.num_value_heads, rows, inputs.v_first ? inputs.key_dim : inputs.value_dim};
    return empty(sizes, 4, like, state_type(q.dtype));
  }
  Tensor like_v(const Tensor& like) const {
    const int64_t sizes[] = {v.size(0), v.size(1), v.size(2), v.size(3)};
    return empty(sizes, 4, like);
  }
  Indices indices(const View& arg) const {
    check.dtype(arg, {DType::kInt32, DType::kInt64});
    check.same_device(arg, q);
    check.contiguous(arg);
    return {arg.data, arg.dtype == DType::kInt64};
  }

 private:
  static TokenStrides strides(const View& arg) { return {arg.stride(0), arg.stride(1), arg.stride(2)}; }

  // Return the data of a contiguous tensor [B, T, HV], or [B, T, HV, last] if `last` is not negative.
  const void* of_tokens(const OptionalTensor& tensor, const char* name, int64_t last) const {
    if (!tensor) return nullptr;
    const View arg(*tensor, name);
    if (last < 0) {
      check.shape(arg, {v.size(0), v.size(1), v.size(2)});
    } else {
      check.shape(arg, {v.size(0), v.size(1), v.size(2), last});
    }
    check.dtype(arg, {state_dtype(q.dtype)});
    check.same_device(arg, q);
    check.contiguous(arg);
    check.aligned(arg);
    return arg.data;
  }

  void take(const View& cu_seqlens) {
    check.rank(cu_seqlens, 1, 1);
    inputs.cu_seqlens = indices(cu_seqlens);
    if (cu_seqlens.size(0) < 1) check.fail(cu_seqlens, "got no elements, wanted at least one");
    if (inputs.batch_size != 1)
      check.fail(q, "got a batch of " + std::to_string(inputs.batch_size) + ", wanted 1 with cu_seqlens");
    inputs.num_sequences = cu_seqlens.size(0) - 1;
    if (inputs.num_sequences == 0 && inputs.num_tokens > 0)
      check.fail(cu_seqlens,
                 "got one element, wanted at least two with " + std::to_string(inputs.num_tokens) + " tokens");
    if (kOnCuda) return;  // kernels clamp the values instead
    for (int64_t n = 0; n <= inputs.num_sequences; ++n) {
      const int64_t got = inputs.cu_seqlens[n], least = n ? inputs.cu_seqlens[n - 1] : 0;
      const bool last = n == inputs.num_sequences;
      if (got < least || (n == 0 && got != 0) || (last && got != inputs.num_tokens))
        check.fail(cu_seqlens, "got " + std::to_string(got) + " at " + std::to_string(n) +
                                   ", wanted offsets from 0 to " + std::to_string(inputs.num_tokens) +
                                   " that do not decrease");
    }
  }
};

}  // namespace flashinfer::binding
