// The operator of attention's gradients. The kernels are in prefill_backward_cpu.cc and
// prefill_backward_cuda.cu.
#include "binding/binding.h"

#include <flashinfer/attention/prefill_backward.h>

#include <tuple>

namespace flashinfer::binding {
namespace {

using OptionalTensor = std::optional<Tensor>;

// Return a contiguous table on the device of `like`, or on the host if `like` is null; null without a
// tensor.
template <typename T>
const T* table(const Check& check, const OptionalTensor& tensor, const char* name, DType dtype, int64_t at_least,
               const View* like = nullptr) {
  if (!tensor) return nullptr;
  const View view(*tensor, name);
  check.dtype(view, {dtype});
  check.contiguous(view);
  if (like) {
    check.same_device(view, *like);
  } else if (view.device_type != aoti_torch_device_type_cpu()) {
    check.fail(view, "got a tensor of a device, wanted the CPU");
  }
  if (view.numel < at_least)
    check.fail(view, "got " + std::to_string(view.numel) + " elements, wanted " + std::to_string(at_least));
  return static_cast<const T*>(view.data);
}

// Keys and values are [tokens, heads, head_dim], or [heads, tokens, head_dim] if `layout` is 1.
HeadRows rows_of(const View& view, int64_t layout) { return {view.data, view.stride(layout), view.stride(1 - layout)}; }

// CUDA kernels take heads of up to 256 elements and read eight at a time.
void check_head_dim(const Check& check, const View& arg) {
  if (kOnCuda && (arg.size(-1) > 256 || arg.size(-1) % 8 != 0))
    check.fail(arg, "got head_dim " + std::to_string(arg.size(-1)) + ", wanted a multiple of 8 up to 256 on CUDA");
}

// Requires that all requests lie within the tensors: kernels read these tables without a check. Return the
// number of keys.
int64_t check_requests(const Check& check, PrefillBackwardParams& params, const View& q, const View& k,
                       int64_t mask_bytes, int64_t layout) {
  int64_t keys = 0, bytes = 0;
  for (int64_t b = 0; b < params.batch_size; ++b) {
    const int64_t start = params.qo_indptr ? params.qo_indptr[b] : 0;
    const int64_t stop = params.qo_indptr ? params.qo_indptr[b + 1] : q.size(0);
    const int64_t kv_len = params.kv_lens ? params.kv_lens[b] : k.size(layout);
    if (start < 0 || stop < start || stop > q.size(0))
      check.fail("qo_indptr", "leads out of q at request " + std::to_string(b));
    if (kv_len < 0) check.fail("kv_lens", "got a negative length at request " + std::to_string(b));
    keys += kv_len, bytes += ((stop - start) * kv_len + 7) / 8;
  }
  if (keys > k.size(layout) || keys > INT32_MAX) check.fail("kv_lens", "got more keys than k has");
  if (params.mask_mode == MaskMode::kCustom && mask_bytes < bytes)
    check.fail("packed_mask", "got " + std::to_string(mask_bytes) + " bytes, wanted " + std::to_string(bytes));
  return keys;
}

std::tuple<Tensor, Tensor, Tensor> prefill_backward(const Tensor& q_, const Tensor& k_, const Tensor& v_,
                                                    const Tensor& out_, const Tensor& lse_, const Tensor& grad_,
                                                    const Tensor& grad_lse_, const OptionalTensor& qo_indptr,
                                                    const OptionalTensor& kv_lens, const OptionalTensor& packed_mask,
                                                    const OptionalTensor& alibi_slopes, int64_t layout,
                                                    int64_t mask_mode, int64_t window_left, double logits_soft_cap,
                                                    double sm_scale) {
  const Check check("prefill_backward");
  const View q(q_, "q"), k(k_, "k"), v(v_, "v"), out(out_, "out"), lse(lse_, "lse"), grad(grad_, "grad"),
      grad_lse(grad_lse_, "grad_lse");
  check.that(layout == 0 || layout == 1, "layout", "wanted 0 (NHD) or 1 (HND)");
  check.that(mask_mode >= 0 && mask_mode <= 2, "mask_mode", "wanted 0 to 2");
  if (kOnCuda) {
    check.dtype(q, {DType::kFloat16, DType::kBFloat16});
  } else {
    check.floating(q);
  }
  check.rank(q, 3, 3);
  check.rank(k, 3, 3);
  const int64_t tokens = k.size(layout), heads = k.size(1 - layout);
  check.that(heads >= 1 && q.size(1) >= 1 && q.size(1) % heads == 0, "q", "wanted a multiple of the heads of k");
  check.that(q.size(2) >= 1 && v.size(-1) >= 1, "q", "wanted a head_dim above 0");
  if (layout == 0) check.shape(k, {tokens, heads, q.size(2)}), check.shape(v, {tokens, heads, -1});
  if (layout == 1) check.shape(k, {heads, tokens, q.size(2)}), check.shape(v, {heads, tokens, -1});
  for (const View* arg : {&out, &grad}) check.shape(*arg, {q.size(0), q.size(1), v.size(-1)});
  for (const View* arg : {&k, &v, &out, &grad}) check.same_dtype(*arg, q);
  for (const View* arg : {&k, &v, &out, &lse, &grad, &grad_lse}) check.same_device(*arg, q);
  for (const View* arg : {&q, &k, &v, &out, &grad})
    check_head_dim(check, *arg), check.last_contiguous(*arg), check.wide_rows(*arg);
  for (const View* arg : {&lse, &grad_lse}) {
    check.dtype(*arg, {DType::kFloat32});
    check.shape(*arg, {q.size(0), q.size(1)});
    check.contiguous(*arg);
  }
  if (q.size(0) * q.size(1) > INT32_MAX) check.fail(q, "got more than 2147483647 rows");

  PrefillBackwardParams params{};
  params.batch_size = kv_lens ? View(*kv_lens, "kv_lens").numel : 1;
  check.that(qo_indptr.has_value() == kv_lens.has_value(), "kv_lens", "wanted one with qo_indptr, and none without");
  params.qo_indptr = table<int32_t>(check, qo_indptr, "qo_indptr", DType::kInt32, params.batch_size + 1);
  params.kv_lens = table<int32_t>(check, kv_lens, "kv_lens", DType::kInt32, params.batch_size);
  params.custom_mask = table<uint8_t>(check, packed_mask, "packed_mask", DType::kUInt8, 0, &q);
  params.alibi_slopes = table<float>(check, alibi_slopes, "alibi_slopes", DType::kFloat32, q.size(1), &q);
  params.mask_mode = static_cast<MaskMode>(mask_mode);
  check.that(params.mask_mode != MaskMode::kCustom || packed_mask.has_value(), "packed_mask", "got none, wanted one");
  const int64_t keys =
      check_requests(check, params, q, k, packed_mask ? View(*packed_mask, "packed_mask").numel : 0, layout);
  params.window_left = static_cast<int32_t>(window_left < 0 ? -1 : window_left < INT32_MAX ? window_left : INT32_MAX);
  params.logits_soft_cap = static_cast<float>(logits_soft_cap), params.sm_scale = static_cast<float>(sm_scale);
  params.tokens = q.size(0), params.kv_tokens = tokens;
  params.num_qo_heads = static_cast<int32_t>(q.size(1)), params.num_kv_heads = static_cast<int32_t>(heads);
  params.head_dim_qk = static_cast<int32_t>(q.size(2)), params.head_dim_vo = static_cast<int32_t>(v.size(-1));
  params.lse = static_cast<const float*>(lse.data), params.grad_lse = static_cast<const float*>(grad_lse.data);
  params.dtype = q.dtype;
  params.q = rows_of(q, 0), params.out = rows_of(out, 0), params.grad = rows_of(grad, 0);
  params.k = rows_of(k, layout), params.v = rows_of(v, layout);

  const OnDevice where(q);
  Tensor dq = empty_like(q, q_), dk = empty_like(k, k_), dv = empty_like(v, v_);
  const View of_q(dq, "dq"), of_k(dk, "dk"), of_v(dv, "dv");
  params.dq = rows_of(of_q, 0), params.dk = rows_of(of_k, layout), params.dv = rows_of(of_v, layout);
  // Tokens of no request get zeros: they do not contribute to the result.
  const auto clear = [&](const View& arg) {
    if (arg.numel > 0) prefill_backward_clear(arg.data, arg.numel * size_of(arg.dtype), where);
  };
  const int32_t* starts = params.qo_indptr;
  if (starts && (starts[0] > 0 || starts[params.batch_size] < params.tokens)) clear(of_q);
  if (keys < tokens) clear(of_k), clear(of_v);
  const Tensor memory = empty_bytes(prefill_backward_plan(params, where), q_);
  params.memory = static_cast<float*>(View(memory, "memory").data);
  prefill_backward(params, where);
  return {std::move(dq), std::move(dk), std::move(dv)};
}

FLASHINFER_LIBRARY(m) { m.impl("prefill_backward", box<prefill_backward>); }

}  // namespace
}  // namespace flashinfer::binding
