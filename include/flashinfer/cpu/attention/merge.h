// Merge of partial states: m = max_i m_i, l = sum_i 2^(m_i - m) l_i, O = (1 / l) sum_i 2^(m_i - m) O_i.
#pragma once

#include <flashinfer/cpu/attention/tile.h>
#include <flashinfer/cpu/parallel.h>

namespace flashinfer::cpu {

// Merge the partial states of one tile in the order of its splits.
template <typename Variant, typename Types, typename Params>
void merge_tile(const Params& params, const MergeItem& item, int32_t kv_head) {
  using Row = Tile<Variant, Types, Params>;
  constexpr int kDV = Types::HEAD_DIM_VO;
  const AttentionParams& common = params;
  const Variant variant(params, static_cast<uint32_t>(item.batch), nullptr);
  const int32_t group = static_cast<int32_t>(common.group.divisor);
  const int32_t rows = Row::rows_of(common, item.qo_len, item.row_start);
  for (int32_t row = 0; row < rows; ++row) {
    const int64_t first = (int64_t{item.first_slot} * common.num_kv_heads + kv_head) * common.slot_rows + row;
    const int64_t step = int64_t{common.num_kv_heads} * common.slot_rows;
    float m = -math::inf, l = 0;
    for (int64_t i = 0, at = first; i < item.num_slots; ++i, at += step) {
      const PartialSoftmax part = common.partial_ml[at];
      if (part.l != 0 && part.m > m) m = part.m;
    }
    alignas(64) float sums[Types::kSumStride] = {};
    for (int64_t i = 0, at = first; i < item.num_slots; ++i, at += step) {
      const PartialSoftmax part = common.partial_ml[at];
      const float weight = !Variant::use_softmax ? 1.0f : part.l == 0 ? 0.0f : math::ptx_exp2(part.m - m);
      if (weight == 0) continue;
      l += weight * part.l;
      for_lanes<kDV>([&](int d, int count) {
        store(sums + d, load(sums + d) + load(common.partial_o + at * kDV + d, count) * weight);
      });
    }
    const int32_t query = static_cast<int32_t>(common.group.div(item.row_start + row));
    const int32_t head = kv_head * group + item.row_start + row - query * group;
    const float rescale = add_sink<Variant>(params, head, m, l);
    const float scale = normaliser_of<Variant>(l, rescale) * common.o_scale;
    Row::write_row(params, variant, item.batch, item.qo_start, query, head, sums, scale, m, l);
  }
}

// Merge all tiles of all heads, after all items are computed.
template <typename Variant, typename Types, typename Params>
void merge_all(const Params& params) {
  const int64_t heads = params.num_kv_heads, merges = params.num_merges();
  parallel_tasks(merges * heads, [&](const auto& next) {
    for (int64_t task; (task = next()) < merges * heads;)
      merge_tile<Variant, Types>(params, params.merge(static_cast<int32_t>(task / heads)),
                                 static_cast<int32_t>(task % heads));
  });
}

}  // namespace flashinfer::cpu
