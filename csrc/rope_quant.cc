// Operators of the rope_quant family.
#include "binding/binding.h"
#include "binding/quant_scale.h"

#include <flashinfer/common/rope_quant.h>

#include <optional>
#include <string>
#include <vector>

namespace flashinfer::binding {
namespace {

constexpr int64_t kMaxRotaryDim = 512;  // of the CPU's table of one token

// Dimensions of an output: those of a token or a slot of a page, and of a head.
struct Axes {
  int64_t token, head;
};
constexpr Axes kSlots = {1, 1};  // of a cache without heads

// Inputs and outputs of one operator. Every argument is checked before the first write.
class Heads {
 public:
  Heads(const Check& check, const char* op, const View& q_rope, const View& cache, const View& pos_ids, bool is_neox)
      : check_(check), like_(q_rope) {
    check.rank(q_rope, 3, 3);
    check.floating(q_rope);
    check.rank(cache, 2, 2);
    check.dtype(cache, {DType::kFloat32});
    check.same_device(cache, q_rope);
    check.last_contiguous(cache);
    check.aligned(cache);
    const int64_t dim = cache.size(1);
    if (dim % 2 != 0 || dim > kMaxRotaryDim)
      check.fail(cache, "got a last dimension of " + std::to_string(dim) + ", wanted an even one of at most " +
                            std::to_string(kMaxRotaryDim));
    check.dtype(pos_ids, {DType::kInt32, DType::kInt64});
    check.shape(pos_ids, {q_rope.size(0)});
    check.same_device(pos_ids, q_rope);
    check.contiguous(pos_ids);
    check.aligned(pos_ids);
    params_.num_tokens = q_rope.size(0), params_.rotary_dim = dim, params_.interleave = !is_neox;
    params_.pos_ids = {pos_ids.data, pos_ids.dtype == DType::kInt64};
    params_.cos_sin_cache = static_cast<const float*>(cache.data);
    params_.cache_size = cache.size(0), params_.cache_stride = cache.stride(0);
    params_.dtype = q_rope.dtype, params_.op = op;
    reads(cache), reads(pos_ids);
  }

  void reads(const View& arg) { inputs_.push_back(arg); }

  // Add heads of [tokens, heads, dim], or [tokens, dim] for one head.
  void add(const View& in, const View& out, const QuantScale& scale, bool rotates, std::optional<Axes> in_cache = {},
           int64_t offset = 0) {
    check_.same_dtype(in, like_);
    check_.same_device(in, like_);
    check_.last_contiguous(in);
    check_.aligned(in);
    if (in.size(0) != like_.size(0))
      check_.fail(in, "got " + std::to_string(in.size(0)) + " tokens, wanted " + std::to_string(like_.size(0)) +
                          " as q_rope has");
    if (rotates && in.size(-1) != params_.rotary_dim)
      check_.fail(in, "got a last dimension of " + std::to_string(in.size(-1)) + ", wanted " +
                          std::to_string(params_.rotary_dim) + " as cos_sin_cache has");
    if (params_.count == 0)
      check_.dtype(out, {DType::kFloat8E4M3, DType::kFloat8E5M2}), params_.output_dtype = out.dtype;
    else if (out.dtype != params_.output_dtype)
      check_.fail(out.name,
                  std::string("got ") + to_string(out.dtype) + ", wanted " + to_string(params_.output_dtype) +
                      " as the first output has",
                  "TypeError");
    check_.same_device(out, like_);
    check_.last_contiguous(out);
    if (!in_cache) check_.same_shape(out, in);
    reads(in);
    if (offset == 0) outputs_.push_back(out);
    if (in.numel == 0) return;
    const bool with_heads = in.ndim == 3;
    const int64_t heads = with_heads ? in.size(1) : 1;
    const auto stride = [](const View& arg, int64_t dim) { return arg.size(dim) > 1 ? arg.stride(dim) : 0; };
    const Axes axes = in_cache.value_or(Axes{0, 1});
    size_ += heads * in.size(-1);
    if (size_ > INT32_MAX) check_.fail(in, "got tokens of more than 2^31 elements");
    params_.parts[params_.count++] = {.input = in.data,
                                      .output = static_cast<uint8_t*>(out.data) + offset,
                                      .heads = heads,
                                      .dim = in.size(-1),
                                      .input_token_stride = stride(in, 0),
                                      .input_head_stride = with_heads ? stride(in, 1) : 0,
                                      .output_token_stride = stride(out, axes.token),
                                      .output_head_stride = with_heads ? stride(out, axes.head) : 0,
                                      .page_stride = in_cache ? stride(out, 0) : 0,
                                      .scale = scale,
                                      .rotates = rotates,
                                      .paged = in_cache.has_value()};
  }

  void set_pages(const PageTable& pages) { params_.pages = pages; }

  void run(std::optional<bool> enable_pdl) {
    for (size_t i = 0; i < outputs_.size(); ++i) {
      check_.writable(outputs_[i]);
      for (const View& in : inputs_) check_.no_overlap(outputs_[i], in, false);
      for (size_t j = 0; j < i; ++j) check_.no_overlap(outputs_[i], outputs_[j], false);
    }
    if (params_.num_tokens > 0 && params_.count > 0) rope_quant(params_, OnDevice(like_, enable_pdl));
  }

 private:
  const Check& check_;
  const View& like_;
  RopeQuantParams params_{};
  int64_t size_ = 0;  // elements of a token
  std::vector<View> inputs_, outputs_;
};

void same_heads(const Check& check, const View& nope, const View& rope) {
  check.rank(nope, rope.ndim, rope.ndim);
  if (nope.ndim == 3) check.shape(nope, {rope.size(0), rope.size(1), -1});
}

void rope_quantize_fp8(const Tensor& q_rope, const Tensor& k_rope, const Tensor& q_nope, const Tensor& k_nope,
                       const Tensor& cos_sin_cache, const Tensor& pos_ids, bool is_neox, double quant_scale_q,
                       const std::optional<Tensor>& quant_scale_q_tensor, double quant_scale_kv,
                       const std::optional<Tensor>& quant_scale_kv_tensor, const Tensor& q_rope_out,
                       const Tensor& k_rope_out, const Tensor& q_nope_out, const Tensor& k_nope_out,
                       std::optional<bool> enable_pdl) {
  const Check check("rope_quantize_fp8");
  const View q(q_rope, "q_rope"), k(k_rope, "k_rope"), qn(q_nope, "q_nope"), kn(k_nope, "k_nope");
  const View q_out(q_rope_out, "q_rope_out"), k_out(k_rope_out, "k_rope_out");
  const View qn_out(q_nope_out, "q_nope_out"), kn_out(k_nope_out, "k_nope_out");
  const View cache(cos_sin_cache, "cos_sin_cache"), at(pos_ids, "pos_ids");
  Heads heads(check, "rope_quantize_fp8", q, cache, at, is_neox);
  check.rank(k, 2, 3);
  same_heads(check, qn, q), same_heads(check, kn, k);
  const QuantScale scale_q = quant_scale(check, quant_scale_q, quant_scale_q_tensor, "quant_scale_q", q);
  const QuantScale scale_kv = quant_scale(check, quant_scale_kv, quant_scale_kv_tensor, "quant_scale_kv", q);
  heads.add(q, q_out, scale_q, true);
  heads.add(k, k_out, scale_kv, true);
  heads.add(qn, qn_out, scale_q, false);
  heads.add(kn, kn_out, scale_kv, false);
  heads.run(enable_pdl);
}

const int32_t* indices(const Check& check, const View& arg, const View& like, int64_t size) {
  check.dtype(arg, {DType::kInt32});
  check.shape(arg, {size});
  check.same_device(arg, like);
  check.contiguous(arg);
  check.aligned(arg);
  return static_cast<const int32_t*>(arg.data);
}

void rope_quantize_fp8_append(const Tensor& q_rope, const Tensor& k_rope, const Tensor& q_nope, const Tensor& k_nope,
                              const std::optional<Tensor>& v, const Tensor& cos_sin_cache, const Tensor& pos_ids,
                              const Tensor& k_cache, const Tensor& v_cache, const Tensor& kv_indices,
                              const Tensor& kv_indptr, const Tensor& batch_indices, const Tensor& positions,
                              bool is_neox, double quant_scale_q, const std::optional<Tensor>& quant_scale_q_tensor,
                              double quant_scale_kv, const std::optional<Tensor>& quant_scale_kv_tensor,
                              int64_t page_size, bool heads_first, const Tensor& q_rope_out, const Tensor& q_nope_out,
                              std::optional<bool> enable_pdl) {
  constexpr const char* kOp = "rope_quantize_fp8_append_paged_kv_cache";
  const Check check(kOp);
  const View q(q_rope, "q_rope"), k(k_rope, "k_rope"), qn(q_nope, "q_nope"), kn(k_nope, "k_nope");
  const View q_out(q_rope_out, "q_rope_out"), qn_out(q_nope_out, "q_nope_out");
  const View first(k_cache, "paged_kv_cache[0]"), second(v_cache, "paged_kv_cache[1]");
  const View cache(cos_sin_cache, "cos_sin_cache"), at(pos_ids, "pos_ids");
  const View pages(kv_indices, "kv_indices"), indptr(kv_indptr, "kv_indptr");
  const View requests(batch_indices, "batch_indices"), places(positions, "positions");
  Heads heads(check, kOp, q, cache, at, is_neox);
  check.rank(k, 2, 3);
  same_heads(check, qn, q), same_heads(check, kn, k);
  const QuantScale scale_q = quant_scale(check, quant_scale_q, quant_scale_q_tensor, "quant_scale_q", q);
  const QuantScale scale_kv = quant_scale(check, quant_scale_kv, quant_scale_kv_tensor, "quant_scale_kv", q);
  const bool latent = k.ndim == 2;
  if (v.has_value() == latent)
    check.fail("v", latent ? "got Tensor, wanted None, because k_rope has 2 dimensions"
                           : "got None, wanted Tensor, because k_rope has 3 dimensions");
  const int64_t num_tokens = q.size(0), rope_dim = k.size(-1), nope_dim = kn.size(-1);
  heads.add(q, q_out, scale_q, true);
  heads.add(qn, qn_out, scale_q, false);
  if (latent) {
    check.shape(first, {-1, page_size, nope_dim});
    check.shape(second, {first.size(0), page_size, rope_dim});
    heads.add(k, second, scale_kv, true, kSlots);
    heads.add(kn, first, scale_kv, false, kSlots);
  } else {
    const View values(*v, "v");
    const Axes axes = heads_first ? Axes{2, 1} : Axes{1, 2};
    const auto shaped = [&](const View& arg, int64_t num_pages, int64_t dim) {
      heads_first ? check.shape(arg, {num_pages, k.size(1), page_size, dim})
                  : check.shape(arg, {num_pages, page_size, k.size(1), dim});
    };
    check.shape(values, {num_tokens, k.size(1), -1});
    shaped(first, -1, rope_dim + nope_dim);
    shaped(second, first.size(0), values.size(-1));
    heads.add(k, first, scale_kv, true, axes);
    heads.add(kn, first, scale_kv, false, axes, rope_dim);
    heads.add(values, second, scale_kv, false, axes);
  }
  if (page_size < 1 || page_size > INT32_MAX)
    check.fail("page_size", "got " + std::to_string(page_size) + ", wanted 1 or more");
  check.rank(indptr, 1, 1);
  if (indptr.size(0) < 1) check.fail(indptr, "got shape [0], wanted [batch_size + 1]");
  for (const View* arg : {&pages, &indptr, &requests, &places}) heads.reads(*arg);
  heads.set_pages({.batch_indices = indices(check, requests, q, num_tokens),
                   .positions = indices(check, places, q, num_tokens),
                   .kv_indices = indices(check, pages, q, -1),
                   .kv_indptr = indices(check, indptr, q, -1),
                   .num_tokens = num_tokens,
                   .num_indices = pages.size(0),
                   .num_pages = first.size(0),
                   .batch_size = indptr.size(0) - 1,
                   .page_size = static_cast<int32_t>(page_size),
                   .op = kOp});
  heads.run(enable_pdl);
}

FLASHINFER_LIBRARY(m) {
  m.impl("rope_quantize_fp8", box<rope_quantize_fp8>);
  m.impl("rope_quantize_fp8_append_paged_kv_cache", box<rope_quantize_fp8_append>);
}

}  // namespace
}  // namespace flashinfer::binding
