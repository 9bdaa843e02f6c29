// The rows of a tile, from queries to outputs, shared by decode and prefill.
//
// A row of logits belongs to one query, with keys in consecutive elements. Hooks, masks and exponentials
// therefore vectorise along the keys.
#pragma once

#include <memory>

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/sinks.h>
#include <flashinfer/attention/variant.h>
#include <flashinfer/cpu/attention/cache.h>
#include <flashinfer/cpu/attention/range.h>
#include <flashinfer/cpu/attention/softmax.h>
#include <flashinfer/cpu/attention/types.h>
#include <flashinfer/cpu/rotation.h>

namespace flashinfer::cpu {

// Rows of queries of one request that read one KV head: a work item of one KV head.
template <typename Variant, typename Types, typename Params>
struct Tile {
  static constexpr float kMasked = Variant::use_softmax ? -math::inf : 0.0f;
  static constexpr int kDQ = Types::HEAD_DIM_QK, kDV = Types::HEAD_DIM_VO;

  const Params& params;
  const AttentionParams& common;  // a variant may have parameters of the same names
  const WorkItem& item;
  int32_t kv_head;
  const int32_t group, rows, first;  // first: the request's first page or row
  const Variant variant;
  Mask mask;

  Tile(const Params& p, const WorkItem& i, int32_t head)
      : params(p),
        common(p),
        item(i),
        kv_head(head),
        group(static_cast<int32_t>(common.group.divisor)),
        rows(rows_of(common, i.qo_len, i.row_start)),
        first(common.kv.indptr ? common.kv.indptr[i.batch] : 0),
        variant(p, static_cast<uint32_t>(i.batch), nullptr),
        mask(common, i, head) {
    narrow(mask, variant);
  }

  // Switches to another KV head of the item.
  void move_to(int32_t head) {
    kv_head = head;
    if (mask.mode == MaskMode::kCustom) mask.bits = Mask::bits_of(common, item, head);
  }

  static int32_t rows_of(const AttentionParams& p, int32_t qo_len, int32_t row_start) {
    const int32_t left = qo_len * static_cast<int32_t>(p.group.divisor) - row_start;
    return left < p.tile_rows ? left : p.tile_rows;
  }

  int32_t query(int row) const { return static_cast<int32_t>(common.group.div(item.row_start + row)); }
  int32_t head(int row) const { return kv_head * group + item.row_start + row - query(row) * group; }

  // Return the keys of the block [block, block + count) that rows first_row ... last_row may see, without
  // custom masks.
  Range visible(int first_row, int last_row, int32_t block, int32_t count) const {
    const int32_t begin = mask.begin(query(first_row)) - block, end = mask.end(query(last_row)) - block;
    return {begin > 0 ? begin : 0, end < count ? end : count};
  }
  // Return the visible range of all the item's keys, numbered in the request.
  Range visible() const {
    const Range range = visible(0, rows - 1, item.kv_start, item.kv_end - item.kv_start);
    return {item.kv_start + range.begin, item.kv_start + range.end};
  }

  const typename Types::DTypeQ* query_row(int row) const {
    return static_cast<const typename Types::DTypeQ*>(common.q) +
           static_cast<int64_t>(item.qo_start + query(row)) * common.q_row + head(row) * common.q_head;
  }

  // Copy queries without change to rows of kQueryStride numbers.
  void copy_queries(typename Types::DTypeQ* to) const {
    for (int row = 0; row < rows; ++row) std::memcpy(to + row * Types::kQueryStride, query_row(row), kDQ * sizeof(*to));
  }
  // Transforms and rotates queries, and scales them if logits need no transformation.
  void load_queries(float* to, const Rotation<kDQ>* rotation) const {
    typename Rotation<kDQ>::Angles angles;
    const bool scaled = Variant::use_softmax && !Variant::transforms_logits;
    for (int row = 0; row < rows; ++row, to += Types::kQueryStride) {
      const auto* q = query_row(row);
      for_lanes<kDQ>([&](int d, int count) { store(to + d, load(q + d, count)); });
      if constexpr (Variant::transforms_query)
        for (int d = 0; d < kDQ; ++d) to[d] = static_cast<float>(variant.QueryTransform(params, to[d]));
      if constexpr (Types::kRope) {
        if (row == 0 || query(row) != query(row - 1)) angles = rotation->angles(item.kv_len - item.qo_len + query(row));
        rotation->rotate(to, angles);
      }
      if constexpr (Variant::use_softmax)
        if (scaled)
          for (int d = 0; d < kDQ; d += kLanes) store(to + d, load(to + d) * static_cast<float>(variant.sm_scale_log2));
    }
  }

  // Convert keys to rows of floats, transformed and rotated, for caches whose elements cannot be used
  // directly.
  static constexpr bool kPreparesKeys = Types::kRope || Variant::transforms_key || sizeof(typename Types::DTypeKV) == 1;
  void prepare_keys(const typename Types::DTypeKV* const* keys, int64_t offset, int32_t begin, int count, float* to,
                    const Rotation<kDQ>* rotation) const {
    typename Rotation<kDQ>::Angles angles;
    for (int t = 0; t < count; ++t, to += Types::kQueryStride) {
      for_lanes<kDQ>([&](int d, int width) { store(to + d, load(keys[t] + offset + d, width)); });
      if constexpr (Variant::transforms_key)
        for (int d = 0; d < kDQ; ++d) to[d] = static_cast<float>(variant.KeyTransform(params, to[d]));
      if constexpr (Types::kRope) {
        const int step = t % Rotation<kDQ>::kSteps;
        if (step == 0) angles = rotation->angles(begin + t);
        rotation->rotate(to, angles, step);
      }
    }
  }

  // Replace S of a row and keys [block + from, block + to) by P. Only keys [0, count) of the block are in
  // the request. from and to: whole vectors.
  void logits_to_weights(int row, float* logits, int32_t block, int32_t count, int from, int to,
                         SoftmaxState::Row state) const {
    // After the request's end, a variant must not use kv_idx as an index.
    if constexpr (Variant::transforms_logits) transform_logits(row, logits, block, from, to < count ? to : count);
    mask_logits(row, logits, block, from, to, visible(row, row, block, count));
    if constexpr (Variant::use_softmax) softmax(logits, from, to, state);
  }

  void transform_logits(int row, float* __restrict logits, int32_t block, int from, int to) const {
    // Copies, which no store to the logits can alias: their members stay in registers.
    const Params own = params;
    const Variant functor = variant;
    const uint32_t batch_idx = item.batch, qo_idx = query(row), qo_head_idx = head(row), kv_head_idx = kv_head;
    float scale = 1.0f;
    if constexpr (Variant::use_softmax) scale = functor.sm_scale_log2;
    FLASHINFER_INDEPENDENT
    for (int t = from; t < to; ++t)
      logits[t] =
          scale * static_cast<float>(functor.LogitsTransform(
                      own, logits[t], batch_idx, qo_idx, static_cast<uint32_t>(block + t), qo_head_idx, kv_head_idx));
  }

  // Overwrites the logits of keys that the row does not see.
  void mask_logits(int row, float* __restrict logits, int32_t block, int from, int to, Range range) const {
    const int32_t qo_idx = query(row);
    if (mask.mode == MaskMode::kCustom) {
      const int64_t first_bit = static_cast<int64_t>(qo_idx) * mask.kv_len + block;
      for (int t = from; t < to && !range.empty(); t += kLanes)
        store(logits + t, select(visible_lanes(mask.bits, first_bit, t, range), load(logits + t), splat(kMasked)));
    } else if (mask.mode == MaskMode::kMultiItem) {
      for (int t = range.begin; t < range.end; ++t)
        if (!mask.sees(qo_idx, block + t)) logits[t] = kMasked;
    }
    if constexpr (Variant::masks_logits) {
      const Params own = params;
      const Variant functor = variant;
      const uint32_t batch_idx = item.batch, qo_head_idx = head(row), kv_head_idx = kv_head;
      FLASHINFER_INDEPENDENT
      for (int t = range.begin; t < range.end; ++t)
        logits[t] = functor.LogitsMask(own, batch_idx, static_cast<uint32_t>(qo_idx), static_cast<uint32_t>(block + t),
                                       qo_head_idx, kv_head_idx)
                        ? logits[t]
                        : kMasked;
    }
    for (int t = from; t < range.begin && t < to; ++t) logits[t] = kMasked;
    for (int t = range.end > from ? range.end : from; t < to; ++t) logits[t] = kMasked;
  }

  // Write a finished row to the output, or its partial state (m, l, O) to the item's slot.
  void finish(int row, float* sums, float m, float l) const {
    if (item.slot < 0) {
      const float rescale = add_sink<Variant>(params, head(row), m, l);
      const float scale = normaliser_of<Variant>(l, rescale) * common.o_scale;
      write_row(params, variant, item.batch, item.qo_start, query(row), head(row), sums, scale, m, l);
      return;
    }
    const int64_t at = (static_cast<int64_t>(item.slot) * common.num_kv_heads + kv_head) * common.slot_rows + row;
    for_lanes<kDV>([&](int d, int count) { store(common.partial_o + at * kDV + d, load(sums + d), count); });
    common.partial_ml[at] = {m, l};
  }

  static void write_row(const Params& params, const Variant& variant, int32_t batch, int32_t qo_start, int32_t query,
                        int32_t head, float* sums, float scale, float m, float l) {
    const AttentionParams& common = params;
    const int64_t token = qo_start + query;
    auto* o = static_cast<typename Types::DTypeO*>(common.o) + token * common.o_row + head * common.o_head;
    for (int d = 0; d < kDV; d += kLanes) store(sums + d, load(sums + d) * scale);
    if constexpr (Variant::transforms_output)
      for (int d = 0; d < kDV; ++d) sums[d] = transform_output(params, variant, sums[d], batch, query, head, m, l);
    for_lanes<kDV>([&](int d, int count) { store(o + d, load(sums + d), count); });
    if (common.lse) common.lse[token * common.num_qo_heads + head] = l == 0 ? -math::inf : m + math::ptx_log2(l);
  }
};

template <typename Types, typename Params>
std::unique_ptr<const Rotation<Types::HEAD_DIM_QK>> rotation_of(const Params& params) {
  if constexpr (!Types::kRope) return nullptr;
  const double* numbers = numbers_of(params, 0);
  return std::make_unique<const Rotation<Types::HEAD_DIM_QK>>(
      numbers ? 1.0 / numbers[kRopeScale] : params.rope_rcp_scale,
      numbers ? 1.0 / numbers[kRopeTheta] : params.rope_rcp_theta);
}

}  // namespace flashinfer::cpu
