// Operators of the rope family.
#include "binding/binding.h"

#include <flashinfer/common/rope.h>

#include <cmath>
#include <cstring>
#include <tuple>

namespace flashinfer::binding {
namespace {

// Arguments that turn positions into angles.
struct Frequencies {
  double rope_scale, rope_theta;
  bool llama31;  // the next three are in use
  double low_freq_factor, high_freq_factor;
  int64_t old_context_len;

  void check(const Check& check) const {
    const auto wanted = [&](bool holds, const char* name, auto got, const char* text) {
      if (!holds) check.fail(name, "got " + std::to_string(got) + ", wanted " + text);
    };
    wanted(rope_scale > 0 && std::isfinite(rope_scale), "rope_scale", rope_scale, "a positive number");
    wanted(rope_theta > 0 && std::isfinite(rope_theta), "rope_theta", rope_theta, "a positive number");
    if (!llama31) return;
    wanted(low_freq_factor > 0, "low_freq_factor", low_freq_factor, "a positive number");
    wanted(high_freq_factor >= low_freq_factor, "high_freq_factor", high_freq_factor, "at least low_freq_factor");
    wanted(old_context_len > 0, "old_context_len", old_context_len, "a positive number");
  }

  // Return the frequency of pair i in radians per position. Llama 3.1 keeps frequencies with high_freq_factor
  // rotations or more in the old context. It scales those with low_freq_factor rotations or less and blends
  // linearly between.
  double of_pair(int64_t i, int64_t rotary_dim) const {
    const double frequency = std::pow(rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim));
    const double scaled = frequency / rope_scale;
    if (!llama31) return scaled;
    const double turns = static_cast<double>(old_context_len) * frequency / (2 * M_PI);
    if (turns >= high_freq_factor) return frequency;
    if (turns <= low_freq_factor) return scaled;
    const double kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
    return kept * frequency + (1 - kept) * scaled;
  }

  bool operator==(const Frequencies& other) const {
    return rope_scale == other.rope_scale && rope_theta == other.rope_theta && llama31 == other.llama31 &&
           low_freq_factor == other.low_freq_factor && high_freq_factor == other.high_freq_factor &&
           old_context_len == other.old_context_len;
  }

  // Set the frequencies from these numbers or from the tensor that replaces them.
  void set(RopeParams& params, const Check& check, const std::optional<Tensor>& tensor, const View& like) const {
    if (!tensor) {
      this->check(check);
      fill(params.quarters, params.rotary_dim);
      return;
    }
    const View table(*tensor, "frequencies");
    check.dtype(table, {DType::kFloat64});
    check.shape(table, {params.rotary_dim / 2});
    check.same_device(table, like);
    check.contiguous(table);
    params.frequencies = static_cast<const double*>(table.data);
    if (kOnCuda) return;
    for (int64_t i = 0; i < params.rotary_dim / 2; ++i) {
      const double frequency = params.frequencies[i];
      check.that(frequency > 0 && std::isfinite(frequency), "frequencies",
                 "wanted positive numbers, so of rope_scale and rope_theta");
      params.quarters[i] = frequency * M_2_PI;
    }
  }

  // Cache the last table, because a model has equal arguments in every layer.
  void fill(double (&quarters)[kMaxRotaryPairs], int64_t rotary_dim) const {
    thread_local Frequencies last{};
    thread_local int64_t last_dim = -1;
    thread_local double table[kMaxRotaryPairs];
    if (!(last == *this) || last_dim != rotary_dim) {
      for (int64_t i = 0; i < kMaxRotaryPairs; ++i)
        table[i] = i < rotary_dim / 2 ? of_pair(i, rotary_dim) * M_2_PI : 0.0;
      last = *this, last_dim = rotary_dim;
    }
    std::memcpy(quarters, table, sizeof(table));
  }
};

// q and k of an operator: [tokens, heads, head_dim], or [tokens, heads * head_dim].
struct Heads {
  const Check& check;
  View q, k;
  int64_t head_dim;

  Heads(const Check& check_, const View& q_, const View& k_, int64_t head_dim_)
      : check(check_), q(q_), k(k_), head_dim(head_dim_) {
    check.trainable(q);
    check.same_dtype(k, q);
    check.same_device(k, q);
    if (head_dim < 1)
      check.fail(q.ndim == 3 ? q.name : "head_size",
                 "got " + std::to_string(head_dim) + ", wanted a positive size of a head");
    for (const View* arg : {&q, &k}) {
      if (arg->ndim == 3) {
        check.shape(*arg, {q.size(0), -1, head_dim});
      } else if (check.shape(*arg, {q.size(0), -1}); arg->size(1) % head_dim != 0) {
        check.fail(*arg, "got a last dimension of " + std::to_string(arg->size(1)) +
                             ", wanted a multiple of head_size, " + std::to_string(head_dim));
      }
      check.last_contiguous(*arg);
      check.aligned(*arg);
    }
  }

  void check_in_place(std::initializer_list<const View*> others) const {
    for (const View* arg : {&q, &k}) {
      check.writable(*arg);
      for (const View* other : others) check.no_overlap(*arg, *other, false);
    }
    check.no_overlap(q, k, false);
  }

  int64_t heads(const View& view) const { return view.ndim == 3 ? view.size(1) : view.size(1) / head_dim; }
  // A single token or head may have any stride; it is ignored.
  static int64_t token_stride(const View& view) { return view.size(0) > 1 ? view.stride(0) : 0; }
  int64_t head_stride(const View& view) const {
    return heads(view) < 2 ? 0 : view.ndim == 3 ? view.stride(1) : head_dim;
  }

  RopeHeads of(const View& in, const View& out) const {
    return {in.data, out.data, heads(in), token_stride(in), head_stride(in), token_stride(out), head_stride(out)};
  }
};

Indices indices(const Check& check, const View& arg, const View& like) {
  check.dtype(arg, {DType::kInt32, DType::kInt64});
  check.same_device(arg, like);
  check.contiguous(arg);
  check.aligned(arg);
  return {arg.data, arg.dtype == DType::kInt64};
}

int64_t checked_rotary_dim(const Check& check, std::optional<int64_t> rotary_dim, int64_t head_dim, const char* name) {
  const int64_t dim = rotary_dim.value_or(head_dim);
  if (dim >= 0 && dim % 2 == 0 && dim <= head_dim && dim <= 2 * kMaxRotaryPairs) return dim;
  check.fail(name, "got " + std::to_string(dim) + ", wanted an even number of at most the head's size of " +
                       std::to_string(head_dim) + " and of at most " + std::to_string(2 * kMaxRotaryPairs));
}

struct NewHeads {
  Tensor q, k;
};

NewHeads new_heads(const Tensor& q, const Tensor& k) {
  return {empty_like(View(q, "q"), q), empty_like(View(k, "k"), k)};
}

// Write into new heads, or in place without them.
void run(RopeParams& params, const Heads& heads, const NewHeads* out, bool interleave) {
  params.q = heads.of(heads.q, out ? View(out->q, heads.q.name) : heads.q);
  params.k = heads.of(heads.k, out ? View(out->k, heads.k.name) : heads.k);
  params.num_tokens = heads.q.size(0), params.head_dim = heads.head_dim, params.dtype = heads.q.dtype;
  params.in_place = !out, params.interleave = interleave;
  rope(params, OnDevice(heads.q));
}

// ---- positions from requests
// -------------------------------------------------------------------------------

void by_requests(const Tensor& q, const Tensor& k, const NewHeads* out, const Tensor& indptr, const Tensor& offsets,
                 std::optional<int64_t> rotary_dim, bool interleave, const Frequencies& frequencies,
                 const std::optional<Tensor>& table = std::nullopt, bool inverse = false) {
  const Check check("apply_rope");
  const View q_view(q, "q"), k_view(k, "k"), starts(indptr, "indptr"), first(offsets, "offsets");
  check.rank(q_view, 3, 3);
  check.rank(k_view, 3, 3);
  const Heads heads(check, q_view, k_view, q_view.size(2));
  check.rank(starts, 1, 1);
  check.that(starts.numel > 0, "indptr", "got no element, wanted the number of requests and one more");
  check.shape(first, {starts.numel - 1});
  RopeParams params{};
  params.inverse = inverse;
  params.with_requests = true, params.num_requests = starts.numel - 1;
  params.indptr = indices(check, starts, q_view), params.offsets = indices(check, first, q_view);
  params.rotary_dim = checked_rotary_dim(check, rotary_dim, heads.head_dim, "rotary_dim");
  frequencies.set(params, check, table, q_view);
  if (!out) heads.check_in_place({&starts, &first});
  run(params, heads, out, interleave);
}

std::tuple<Tensor, Tensor> apply_rope(const Tensor& q, const Tensor& k, const Tensor& indptr, const Tensor& offsets,
                                      std::optional<int64_t> rotary_dim, bool interleave, double rope_scale,
                                      double rope_theta, bool llama31, double low_freq_factor, double high_freq_factor,
                                      int64_t old_context_len) {
  NewHeads out = new_heads(q, k);
  by_requests(q, k, &out, indptr, offsets, rotary_dim, interleave,
              {rope_scale, rope_theta, llama31, low_freq_factor, high_freq_factor, old_context_len});
  return {std::move(out.q), std::move(out.k)};
}

std::tuple<Tensor, Tensor> apply_rope_autograd(const Tensor& q, const Tensor& k, const Tensor& indptr,
                                               const Tensor& offsets, std::optional<int64_t> rotary_dim,
                                               bool interleave, double rope_scale, double rope_theta, bool llama31,
                                               double low_freq_factor, double high_freq_factor, int64_t old_context_len,
                                               const std::optional<Tensor>& frequencies, bool inverse) {
  NewHeads out = new_heads(q, k);
  by_requests(q, k, &out, indptr, offsets, rotary_dim, interleave,
              {rope_scale, rope_theta, llama31, low_freq_factor, high_freq_factor, old_context_len}, frequencies,
              inverse);
  return {std::move(out.q), std::move(out.k)};
}

void apply_rope_inplace(const Tensor& q, const Tensor& k, const Tensor& indptr, const Tensor& offsets,
                        std::optional<int64_t> rotary_dim, bool interleave, double rope_scale, double rope_theta,
                        bool llama31, double low_freq_factor, double high_freq_factor, int64_t old_context_len) {
  by_requests(q, k, nullptr, indptr, offsets, rotary_dim, interleave,
              {rope_scale, rope_theta, llama31, low_freq_factor, high_freq_factor, old_context_len});
}

// ---- positions from a tensor
// -------------------------------------------------------------------------------

void by_pos_ids(const Tensor& q, const Tensor& k, const NewHeads* out, const Tensor& pos_ids,
                std::optional<int64_t> rotary_dim, bool interleave, const Frequencies& frequencies,
                const std::optional<Tensor>& table = std::nullopt, bool inverse = false) {
  const Check check("apply_rope_pos_ids");
  const View q_view(q, "q"), k_view(k, "k"), positions(pos_ids, "pos_ids");
  check.rank(q_view, 3, 3);
  check.rank(k_view, 3, 3);
  const Heads heads(check, q_view, k_view, q_view.size(2));
  check.shape(positions, {q_view.size(0)});
  RopeParams params{};
  params.inverse = inverse;
  params.pos_ids = indices(check, positions, q_view);
  params.rotary_dim = checked_rotary_dim(check, rotary_dim, heads.head_dim, "rotary_dim");
  frequencies.set(params, check, table, q_view);
  if (!out) heads.check_in_place({&positions});
  run(params, heads, out, interleave);
}

std::tuple<Tensor, Tensor> apply_rope_pos_ids(const Tensor& q, const Tensor& k, const Tensor& pos_ids,
                                              std::optional<int64_t> rotary_dim, bool interleave, double rope_scale,
                                              double rope_theta, bool llama31, double low_freq_factor,
                                              double high_freq_factor, int64_t old_context_len) {
  NewHeads out = new_heads(q, k);
  by_pos_ids(q, k, &out, pos_ids, rotary_dim, interleave,
             {rope_scale, rope_theta, llama31, low_freq_factor, high_freq_factor, old_context_len});
  return {std::move(out.q), std::move(out.k)};
}

std::tuple<Tensor, Tensor> apply_rope_pos_ids_autograd(const Tensor& q, const Tensor& k, const Tensor& pos_ids,
                                                       std::optional<int64_t> rotary_dim, bool interleave,
                                                       double rope_scale, double rope_theta, bool llama31,
                                                       double low_freq_factor, double high_freq_factor,
                                                       int64_t old_context_len,
                                                       const std::optional<Tensor>& frequencies, bool inverse) {
  NewHeads out = new_heads(q, k);
  by_pos_ids(q, k, &out, pos_ids, rotary_dim, interleave,
             {rope_scale, rope_theta, llama31, low_freq_factor, high_freq_factor, old_context_len}, frequencies,
             inverse);
  return {std::move(out.q), std::move(out.k)};
}

void apply_rope_pos_ids_inplace(const Tensor& q, const Tensor& k, const Tensor& pos_ids,
                                std::optional<int64_t> rotary_dim, bool interleave, double rope_scale,
                                double rope_theta, bool llama31, double low_freq_factor, double high_freq_factor,
                                int64_t old_context_len) {
  by_pos_ids(q, k, nullptr, pos_ids, rotary_dim, interleave,
             {rope_scale, rope_theta, llama31, low_freq_factor, high_freq_factor, old_context_len});
}

// ---- angles from a cache
// -----------------------------------------------------------------------------------

void by_cache(const Tensor& positions, const Tensor& query, const Tensor& key, const NewHeads* out, int64_t head_size,
              const Tensor& cos_sin_cache, bool is_neox, bool inverse = false) {
  const Check check("apply_rope_with_cos_sin_cache");
  const View q(query, "query"), k(key, "key"), where(positions, "positions"), cache(cos_sin_cache, "cos_sin_cache");
  check.rank(q, 2, 3);
  check.rank(k, 2, 3);
  const Heads heads(check, q, k, head_size);
  check.shape(where, {q.size(0)});
  check.rank(cache, 2, 2);
  check.dtype(cache, {DType::kFloat32});
  check.same_device(cache, q);
  check.last_contiguous(cache);
  check.aligned(cache);
  RopeParams params{};
  params.pos_ids = indices(check, where, q);
  params.rotary_dim = checked_rotary_dim(check, cache.size(1), head_size, "cos_sin_cache");
  params.inverse = inverse;
  params.with_cache = true, params.cos_sin_cache = static_cast<const float*>(cache.data);
  params.cache_size = cache.size(0), params.cache_stride = cache.stride(0);
  if (!out) heads.check_in_place({&where, &cache});
  run(params, heads, out, !is_neox);
}

std::tuple<Tensor, Tensor> apply_rope_with_cos_sin_cache(const Tensor& positions, const Tensor& query,
                                                         const Tensor& key, int64_t head_size,
                                                         const Tensor& cos_sin_cache, bool is_neox) {
  NewHeads out = new_heads(query, key);
  by_cache(positions, query, key, &out, head_size, cos_sin_cache, is_neox);
  return {std::move(out.q), std::move(out.k)};
}

std::tuple<Tensor, Tensor> apply_rope_with_cos_sin_cache_autograd(const Tensor& positions, const Tensor& query,
                                                                  const Tensor& key, int64_t head_size,
                                                                  const Tensor& cos_sin_cache, bool is_neox,
                                                                  bool inverse) {
  NewHeads out = new_heads(query, key);
  by_cache(positions, query, key, &out, head_size, cos_sin_cache, is_neox, inverse);
  return {std::move(out.q), std::move(out.k)};
}

void apply_rope_with_cos_sin_cache_inplace(const Tensor& positions, const Tensor& query, const Tensor& key,
                                           int64_t head_size, const Tensor& cos_sin_cache, bool is_neox) {
  by_cache(positions, query, key, nullptr, head_size, cos_sin_cache, is_neox);
}

FLASHINFER_LIBRARY(m) {
  m.impl("apply_rope", box<apply_rope>);
  m.impl("apply_rope_autograd", box<apply_rope_autograd>);
  m.impl("apply_rope_inplace", box<apply_rope_inplace>);
  m.impl("apply_rope_pos_ids", box<apply_rope_pos_ids>);
  m.impl("apply_rope_pos_ids_autograd", box<apply_rope_pos_ids_autograd>);
  m.impl("apply_rope_pos_ids_inplace", box<apply_rope_pos_ids_inplace>);
  m.impl("apply_rope_with_cos_sin_cache", box<apply_rope_with_cos_sin_cache>);
  m.impl("apply_rope_with_cos_sin_cache_autograd", box<apply_rope_with_cos_sin_cache_autograd>);
  m.impl("apply_rope_with_cos_sin_cache_inplace", box<apply_rope_with_cos_sin_cache_inplace>);
}

}  // namespace
}  // namespace flashinfer::binding
