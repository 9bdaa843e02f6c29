// One call of attention: checks of queries, keys, values and results, and the launch of the kernels.
#pragma once

#include "attention/call_arguments.h"

namespace flashinfer::binding {

// Dimension numbers of a cache or of ragged keys: [pages, page_size, heads, dim] with kv_layout NHD, [pages,
// heads, page_size, dim] with HND. Ragged keys have no dimension of pages.
struct KvDims {
  int page, row, head;

  KvDims(bool paged, bool nhd) : page(0), row(paged + !nhd), head(paged + nhd) {}
};

// Queries, keys and values with matching shapes.
struct Inputs {
  const View &q, &k, &v;
  bool paged, nhd;
  KvDims dims;

  Inputs(const Check& check, const View& queries, const View& keys, const View& values, const CallArguments& arguments)
      : q(queries), k(keys), v(values), paged(arguments.paged), nhd(arguments.kv_layout == 0), dims(paged, nhd) {
    check.rank(q, 3, 3);
    if (!paged && k.ndim == 4) check.fail("kv_indices", "got none, wanted the pages of a paged cache");
    if (paged && k.ndim == 3) check.fail("kv_indices", "got pages, wanted none: k has no dimension of pages");
    check.rank(k, paged ? 4 : 3, paged ? 4 : 3);
    const int64_t rows = k.size(dims.row), heads = k.size(dims.head);
    if (heads < 1 || q.size(1) % heads != 0 || q.size(1) < 1)
      check.fail(q, "got " + std::to_string(q.size(1)) + " heads, wanted a multiple of the " + std::to_string(heads) +
                        " heads of k");
    if (k.size(-1) != q.size(2))
      check.fail(k,
                 "got head_dim " + std::to_string(k.size(-1)) + ", wanted " + std::to_string(q.size(2)) + " as q has");
    if (paged && nhd) check.shape(v, {k.size(0), rows, heads, -1});
    if (paged && !nhd) check.shape(v, {k.size(0), heads, rows, -1});
    if (!paged && nhd) check.shape(v, {rows, heads, -1});
    if (!paged && !nhd) check.shape(v, {heads, rows, -1});
    check.same_dtype(v, k);
    ArgumentDevice call_device = arguments.call_device;
    for (const View* arg : {&q, &k, &v})
      call_device.require(check, *arg), check.last_contiguous(*arg), check.wide_rows(*arg);
    if (q.size(0) * q.size(1) > INT32_MAX) check.fail(q, "got more than 2147483647 rows");
  }

  int64_t num_tokens() const { return q.size(0); }
  int64_t num_heads() const { return q.size(1); }

  // The output has the head_dim of values.
  void check_out(const Check& check, const View& out) const {
    check.shape(out, {num_tokens(), num_heads(), v.size(-1)});
    check.same_device(out, q);
    check.last_contiguous(out);
    check.wide_rows(out);
    check.writable(out);
    for (const View* arg : {&q, &k, &v}) check.no_overlap(out, *arg, false);
  }

  void check_lse(const Check& check, const View& lse, const View& out) const {
    check.dtype(lse, {DType::kFloat32});
    check.shape(lse, {num_tokens(), num_heads()});
    check.contiguous(lse);
    check.same_device(lse, q);
    check.no_overlap(lse, out, false);
  }

  AttentionConfig config(DType out, int32_t variant) const {
    return {q.dtype, k.dtype, out, static_cast<int32_t>(q.size(2)), static_cast<int32_t>(v.size(-1)), variant};
  }

  // Copy the pointers and strides that kernels read.
  void put_into(Params& params) const {
    params.q = q.data, params.q_row = q.stride(0), params.q_head = q.stride(1);
    params.num_tokens = num_tokens(), params.num_qo_heads = static_cast<int32_t>(num_heads());
    params.num_kv_heads = static_cast<int32_t>(k.size(dims.head));
    params.group = FastDiv(static_cast<uint32_t>(params.num_qo_heads / params.num_kv_heads));
    KvCache& kv = params.kv;
    kv.k = k.data, kv.k_page = paged ? k.stride(0) : 0, kv.k_row = k.stride(dims.row), kv.k_head = k.stride(dims.head);
    kv.v = v.data, kv.v_page = paged ? v.stride(0) : 0, kv.v_row = v.stride(dims.row), kv.v_head = v.stride(dims.head);
    kv.page_size = FastDiv(paged ? static_cast<uint32_t>(k.size(dims.row) > 0 ? k.size(dims.row) : 1) : 1);
    kv.num_pages = paged ? k.size(0) : k.size(dims.row);
  }
};

// Make the schedule of one request without a plan. Return the number of slots for partial states.
inline int64_t use_one_request(const Check& check, Params& params, const CallArguments& arguments, const Inputs& inputs,
                               const AttentionConfig& config) {
  const int64_t kv_len = inputs.k.size(inputs.dims.row), rows = inputs.num_tokens() * params.group.divisor;
  if (kv_len > INT32_MAX || rows > INT32_MAX) check.fail(inputs.k, "got more than 2147483647 rows");
  if (params.num_kv_heads % arguments.masks != 0)
    check.fail("mask_indptr", "got " + std::to_string(arguments.masks) + " masks, wanted a divisor of the " +
                                  std::to_string(params.num_kv_heads) + " heads of k");
  params.heads_per_mask = static_cast<int32_t>(params.num_kv_heads / arguments.masks);
  if (params.mask_mode == MaskMode::kCustom &&
      arguments.mask_bytes < (inputs.num_tokens() * kv_len + 7) / 8 * arguments.masks)
    check.fail("custom_mask", "got fewer bits than queries times keys");
  AttentionConfig grouped = config;
  grouped.group = static_cast<int32_t>(params.group.divisor);
  const WorkLimits limits = attention_limits(grouped, rows, 0, inputs.q.device);
  const int32_t qo_indptr[] = {0, static_cast<int32_t>(inputs.num_tokens())};
  const int32_t kv_lens[] = {static_cast<int32_t>(kv_len)};
  params.single = plan_single({.batch_size = 1,
                               .qo_indptr = qo_indptr,
                               .kv_lens = kv_lens,
                               .num_kv_heads = params.num_kv_heads,
                               .group = static_cast<int32_t>(params.group.divisor),
                               .mask_mode = params.mask_mode,
                               .window_left = params.window_left,
                               .tile_rows = limits.tile_rows,
                               .concurrency = limits.concurrency,
                               .min_chunk = limits.min_chunk,
                               .kv_step = limits.kv_step,
                               .split = true,
                               .whole_keys = limits.whole_keys});
  params.tile_rows = limits.tile_rows;
  params.slot_rows = static_cast<int32_t>(rows < limits.tile_rows ? rows : limits.tile_rows);
  return params.single.num_chunks > 1 ? static_cast<int64_t>(params.single.num_tiles) * params.single.num_chunks : 0;
}

// Launch the kernels. `params` are those of the call with this call's scales. `out` and `lse` (null: not
// computed) are checked. Temporary memory is allocated on the device of `like`. Return the stream.
inline int64_t attend(const Check& check, Params& params, const CallArguments& arguments, const Inputs& inputs,
                      const View& out, float* lse, const AttentionConfig& config, const Tensor& like) {
  inputs.put_into(params);
  params.o = out.data, params.o_row = out.stride(0), params.o_head = out.stride(1), params.lse = lse;
  const OnDevice where(inputs.q);
  Partials partials = arguments.workspace;
  int64_t slots = arguments.planned ? arguments.max_slots : use_one_request(check, params, arguments, inputs, config);
  OptionalTensor temporary;
  if (slots > 0 && !arguments.planned) {
    partials.bytes = bytes_of_partials(params, slots, inputs.v.size(-1));
    temporary.emplace(empty_bytes(partials.bytes, like));
    require(aoti_torch_get_data_ptr(temporary->get(), &partials.data), "the workspace");
  }
  if (slots > 0) use_partials(check, params, partials, slots, inputs.v.size(-1));
  if (arguments.planned && arguments.tickets < int64_t{params.max_merges} * params.num_kv_heads)
    check.fail("plan", "got room for " + std::to_string(arguments.tickets) + " tickets, wanted " +
                           std::to_string(int64_t{params.max_merges} * params.num_kv_heads) +
                           ", one for each merge and head");
  if (out.numel > 0) attention(params, config, where);
  return reinterpret_cast<int64_t>(static_cast<const Launch&>(where).stream);
}

}  // namespace flashinfer::binding
