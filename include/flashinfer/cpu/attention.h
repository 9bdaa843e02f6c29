// Attention of one work item, key by key: what every backend computes, in the order in which it is defined.
#pragma once

#include <cmath>
#include <vector>

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/variant.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/vec.h>

namespace flashinfer::cpu {

// Element types and shapes of an instance.
template <typename Q, typename KV, typename O, int kHeadDimQK, int kHeadDimVO, PosEncodingMode kPosEncoding>
struct AttentionTypes {
  using DTypeQ = Q;
  using DTypeKV = KV;
  using DTypeO = O;
  static constexpr int HEAD_DIM_QK = kHeadDimQK, HEAD_DIM_VO = kHeadDimVO;
  static constexpr PosEncodingMode POS_ENCODING = kPosEncoding;
};

template <typename T>
inline void rotate_by_position(float* x, int dim, int32_t position, const T& params) {
  for (int i = 0; i < dim / 2; ++i) {
    const float angle = static_cast<float>(position) * params.rope_rcp_scale *
                        std::pow(params.rope_rcp_theta, 2.0f * static_cast<float>(i) / static_cast<float>(dim));
    const float a = x[i], b = x[i + dim / 2], c = std::cos(angle), s = std::sin(angle);
    x[i] = a * c - b * s, x[i + dim / 2] = b * c + a * s;
  }
}

template <typename Variant, typename Types, typename Params>
void attention_item(const Params& params, const WorkItem& item, int32_t kv_head) {
  constexpr int kDQ = Types::HEAD_DIM_QK, kDV = Types::HEAD_DIM_VO;
  constexpr bool kRope = Types::POS_ENCODING == PosEncodingMode::kRopeLlama;
  const Mask mask(params, item);
  const Variant variant(params, static_cast<uint32_t>(item.batch), nullptr);
  const int32_t group = static_cast<int32_t>(params.group.divisor), rows = item.qo_len * group;
  const int32_t first = params.kv.indptr ? params.kv.indptr[item.batch] : 0;
  for (int32_t row = item.row_start; row < rows && row < item.row_start + params.tile_rows; ++row) {
    const int32_t qo_idx = row / group, head = kv_head * group + row % group;
    const int64_t token = item.qo_start + qo_idx;
    const auto* q = static_cast<const typename Types::DTypeQ*>(params.q) + token * params.q_row + head * params.q_head;
    float query[kDQ], key[kDQ], sum[kDV] = {};
    for (int d = 0; d < kDQ; ++d) query[d] = variant.QueryTransform(params, to_float(q[d]));
    if (kRope) rotate_by_position(query, kDQ, item.kv_len - item.qo_len + qo_idx, params);
    float m = -math::inf, total = 0;
    for (int32_t t = item.kv_start; t < item.kv_end; ++t) {
      if (!mask.sees(qo_idx, t) || !variant.LogitsMask(params, item.batch, qo_idx, t, head, kv_head)) continue;
      int64_t page, at;
      params.kv.locate(first, t, page, at);
      const auto* k = static_cast<const typename Types::DTypeKV*>(params.kv.k) + params.kv.k_offset(page, at) +
                      kv_head * params.kv.k_head;
      const auto* v = static_cast<const typename Types::DTypeKV*>(params.kv.v) + params.kv.v_offset(page, at) +
                      kv_head * params.kv.v_head;
      for (int d = 0; d < kDQ; ++d) key[d] = variant.KeyTransform(params, to_float(k[d]));
      if (kRope) rotate_by_position(key, kDQ, t, params);
      float logit = 0;
      for (int d = 0; d < kDQ; ++d) logit += query[d] * key[d];
      logit = variant.LogitsTransform(params, logit, item.batch, qo_idx, t, head, kv_head);
      float weight = logit;
      if constexpr (Variant::use_softmax) {
        const float scaled = logit * variant.sm_scale_log2, higher = scaled > m ? scaled : m;
        const float old = m == -math::inf ? 0.0f : math::ptx_exp2(m - higher);
        for (int d = 0; d < kDV; ++d) sum[d] *= old;
        weight = higher == -math::inf ? 0.0f : math::ptx_exp2(scaled - higher);
        total = total * old + weight, m = higher;
      }
      for (int d = 0; d < kDV; ++d) sum[d] += weight * to_float(v[d]);
    }
    if (Variant::use_softmax && total > 0)
      for (int d = 0; d < kDV; ++d) sum[d] /= total;
    const float lse = total > 0 ? m + math::ptx_log2(total) : -math::inf;
    if (item.slot >= 0) {
      const int64_t at =
          (static_cast<int64_t>(item.slot) * params.num_kv_heads + kv_head) * params.slot_rows + row - item.row_start;
      for (int d = 0; d < kDV; ++d) params.partial_o[at * kDV + d] = sum[d];
      params.partial_lse[at] = lse;
      continue;
    }
    auto* o = static_cast<typename Types::DTypeO*>(params.o) + token * params.o_row + head * params.o_head;
    for (int d = 0; d < kDV; ++d)
      o[d] = from_float<typename Types::DTypeO>(
          variant.OutputTransform(params, sum[d] * params.o_scale, item.batch, qo_idx, head));
    if (params.lse) params.lse[token * params.num_qo_heads + head] = lse;
  }
}

// Puts the pieces of one tile together, in their order.
template <typename Variant, typename Types, typename Params>
void merge_tile(const Params& params, const MergeItem& item, int32_t kv_head) {
  constexpr int kDV = Types::HEAD_DIM_VO;
  const Variant variant(params, static_cast<uint32_t>(item.batch), nullptr);
  const int32_t group = static_cast<int32_t>(params.group.divisor), rows = item.qo_len * group;
  for (int32_t row = item.row_start; row < rows && row < item.row_start + params.tile_rows; ++row) {
    const int32_t qo_idx = row / group, head = kv_head * group + row % group;
    const int64_t token = item.qo_start + qo_idx;
    float sum[kDV] = {}, m = -math::inf, total = 0;
    const auto at = [&](int32_t piece) {
      return (static_cast<int64_t>(item.first_slot + piece) * params.num_kv_heads + kv_head) * params.slot_rows + row -
             item.row_start;
    };
    for (int32_t piece = 0; piece < item.num_slots; ++piece)
      m = params.partial_lse[at(piece)] > m ? params.partial_lse[at(piece)] : m;
    for (int32_t piece = 0; piece < item.num_slots; ++piece) {
      const float lse = params.partial_lse[at(piece)];
      const float weight = !Variant::use_softmax ? 1.0f : lse == -math::inf ? 0.0f : math::ptx_exp2(lse - m);
      if (weight == 0) continue;
      total += weight;
      for (int d = 0; d < kDV; ++d) sum[d] += weight * params.partial_o[at(piece) * kDV + d];
    }
    auto* o = static_cast<typename Types::DTypeO*>(params.o) + token * params.o_row + head * params.o_head;
    const float scale = Variant::use_softmax ? (total > 0 ? params.o_scale / total : 0.0f) : params.o_scale;
    for (int d = 0; d < kDV; ++d)
      o[d] =
          from_float<typename Types::DTypeO>(variant.OutputTransform(params, sum[d] * scale, item.batch, qo_idx, head));
    if (params.lse) params.lse[token * params.num_qo_heads + head] = total > 0 ? m + math::ptx_log2(total) : -math::inf;
  }
}

// All items, then all merges. Which thread does what does not matter to the result.
template <typename Variant, typename Types, typename Params>
void attention(const Params& params) {
  const int64_t heads = params.num_kv_heads;
  parallel_for(params.num_items() * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      attention_item<Variant, Types>(params, params.item(static_cast<int32_t>(i / heads)),
                                     static_cast<int32_t>(i % heads));
  });
  parallel_for(params.num_merges() * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      merge_tile<Variant, Types>(params, params.merge(static_cast<int32_t>(i / heads)),
                                 static_cast<int32_t>(i % heads));
  });
}

}  // namespace flashinfer::cpu
