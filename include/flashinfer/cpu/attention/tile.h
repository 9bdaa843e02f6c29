// What the two attention kernels share: the rows of a tile from queries to outputs, softmax by blocks of keys, merging,
// and how tasks are shared out to threads.
//
// Logits stand in rows, one for each query, keys side by side: hooks, masks and exponentials then run along the keys.
#pragma once

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/variant.h>
#include <flashinfer/common/dispatch.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/rotation.h>
#include <flashinfer/cpu/simd/gemm.h>
#include <flashinfer/cpu/simd/math.h>

namespace flashinfer::cpu {

// Element types and shapes of an instance.
template <typename Q, typename KV, typename O, int kHeadDimQK, int kHeadDimVO, PosEncodingMode kPosEncoding>
struct AttentionTypes {
  using DTypeQ = Q;
  using DTypeKV = KV;
  using DTypeO = O;
  static constexpr int HEAD_DIM_QK = kHeadDimQK, HEAD_DIM_VO = kHeadDimVO;
  static constexpr PosEncodingMode POS_ENCODING = kPosEncoding;
  static constexpr bool kRope = kPosEncoding == PosEncodingMode::kRopeLlama;
  // Rows of queries and of sums, in whole vectors.
  static constexpr int kQueryStride = round_up(kHeadDimQK, kLanes), kSumStride = round_up(kHeadDimVO, kLanes);
};

// Memory of one worker that nobody has written to, aligned to cache lines.
class Scratch {
 public:
  explicit Scratch(int64_t floats)
      : floats_(static_cast<float*>(::operator new(sizeof(float) * floats, std::align_val_t(64)))), next_(floats_) {}
  ~Scratch() { ::operator delete(floats_, std::align_val_t(64)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* take(int64_t floats) {
    float* result = next_;
    next_ += floats;
    return result;
  }

 private:
  float *floats_, *next_;
};

// Rows of keys or values: `count` of them from token `begin` of a request whose pages start at `first`.
template <typename T>
inline void locate_rows(const KvCache& kv, bool keys, int64_t offset, int32_t first, int32_t begin, int32_t count,
                        const T** rows) {
  const T* base = static_cast<const T*>(keys ? kv.k : kv.v) + offset;
  const int64_t stride = keys ? kv.k_row : kv.v_row;
  for (int32_t i = 0; i < count;) {
    int64_t page, row;
    kv.locate(first, begin + i, page, row);
    const T* next = base + (keys ? kv.k_offset(page, row) : kv.v_offset(page, row));
    const int32_t left = count - i;
    const int32_t run = !kv.is_paged() ? left : static_cast<int32_t>(kv.page_size.divisor - row);
    for (const int32_t end = i + (run < left ? run : left); i < end; ++i, next += stride) rows[i] = next;
  }
}

// What of a block of keys a row sees, numbered in the block.
struct KeyRange {
  int32_t begin, end;

  bool empty() const { return begin >= end; }
};

// How far the softmax of each row of a tile has come: the highest logit, the sum of weights, and what the sums of the
// blocks before are to be multiplied by.
struct SoftmaxState {
  float *highest, *total, *factor;

  SoftmaxState(Scratch& scratch, int rows)
      : highest(scratch.take(rows)), total(scratch.take(rows)), factor(scratch.take(rows)) {}

  void reset(int rows) {
    for (int row = 0; row < rows; ++row) highest[row] = -math::inf, total[row] = 0, factor[row] = 1;
  }

  struct Row {
    float &highest, &total, &factor;
  };
  Row at(int row) const { return {highest[row], total[row], factor[row]}; }
};

// Logits in log2 of [from, to), whole vectors, become weights.
inline void softmax(float* logits, int from, int to, SoftmaxState::Row state) {
  vfloat most = splat(-math::inf);
  for (int i = from; i < to; i += kLanes) most = max(most, load(logits + i));
  const float block = maximum_of(most), higher = block > state.highest ? block : state.highest;
  const float reference = higher == -math::inf ? 0.0f : higher;  // where nothing was seen yet all weights are 0
  vfloat sums = {};
  for (int i = from; i < to; i += kLanes) {
    const vfloat weights = exp2(load(logits + i) - reference);
    store(logits + i, weights);
    sums += weights;
  }
  state.factor = state.highest == higher ? 1.0f : math::ptx_exp2(state.highest - reference);
  state.total = state.total * state.factor + total_of(sums);
  state.highest = higher;
}

// Rows of queries of one request that read one key head: a work item of one key head.
template <typename Variant, typename Types, typename Params>
struct Tile {
  static constexpr float kHidden = Variant::use_softmax ? -math::inf : 0.0f;
  static constexpr int kDQ = Types::HEAD_DIM_QK, kDV = Types::HEAD_DIM_VO;

  const Params& params;
  const AttentionParams& common;  // a variant may have parameters of its own of the same names
  const WorkItem& item;
  int32_t kv_head;
  const int32_t group, rows, first;  // first: where the request's pages or rows begin
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
        mask(narrowed(Mask(common, i, head), variant)) {}

  // Goes on with another key head of the item.
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

  // Which keys of the block [block, block + count) rows first_row ... last_row may see, custom masks aside.
  KeyRange visible(int first_row, int last_row, int32_t block, int32_t count) const {
    const int32_t begin = mask.begin(query(first_row)) - block, end = mask.end(query(last_row)) - block;
    return {begin > 0 ? begin : 0, end < count ? end : count};
  }
  // The same of all the item's keys, numbered in the request.
  KeyRange visible() const {
    const KeyRange range = visible(0, rows - 1, item.kv_start, item.kv_end - item.kv_start);
    return {item.kv_start + range.begin, item.kv_start + range.end};
  }

  // Queries as rows of kQueryStride numbers: transformed, rotated, and scaled where logits need no transformation.
  void load_queries(float* to, const Rotation<kDQ>* rotation) const {
    typename Rotation<kDQ>::Angles angles;
    const bool scaled = Variant::use_softmax && !Variant::transforms_logits;
    for (int row = 0; row < rows; ++row, to += Types::kQueryStride) {
      const auto* q = static_cast<const typename Types::DTypeQ*>(common.q) +
                      static_cast<int64_t>(item.qo_start + query(row)) * common.q_row + head(row) * common.q_head;
      for_lanes<kDQ>([&](int d, int count) { store(to + d, load(q + d, count)); });
      if constexpr (Variant::transforms_query)
        for (int d = 0; d < kDQ; ++d) to[d] = static_cast<float>(variant.QueryTransform(params, to[d]));
      if constexpr (Types::kRope) {
        if (row == 0 || query(row) != query(row - 1)) angles = rotation->angles(item.kv_len - item.qo_len + query(row));
        rotation->rotate(to, angles);
      }
      if constexpr (Variant::use_softmax)
        if (scaled)
          for (int d = 0; d < kDQ; d += kLanes) store(to + d, load(to + d) * variant.sm_scale_log2);
    }
  }

  // Keys as rows of floats: transformed and rotated. For what cannot be used as it stands in the cache.
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

  // Products of a row with keys [block + from, block + to), of which only [0, count) are in the request, become
  // weights. from and to: whole vectors.
  void weigh(int row, float* logits, int32_t block, int32_t count, int from, int to, SoftmaxState::Row state) const {
    // Beyond the request there is nothing that a variant could look up by kv_idx.
    if constexpr (Variant::transforms_logits) transform_logits(row, logits, block, from, to < count ? to : count);
    hide(row, logits, block, from, to, visible(row, row, block, count));
    if constexpr (Variant::use_softmax) softmax(logits, from, to, state);
  }

  void transform_logits(int row, float* __restrict logits, int32_t block, int from, int to) const {
    // Copies, which no store to the logits can change: what they hold stays in registers.
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

  // Overwrites what the row does not see.
  void hide(int row, float* __restrict logits, int32_t block, int from, int to, KeyRange range) const {
    const int32_t qo_idx = query(row);
    if (mask.mode == MaskMode::kCustom) {
      hide_by_bits(static_cast<int64_t>(qo_idx) * mask.kv_len + block, logits, from, to, range);
    } else if (mask.mode == MaskMode::kMultiItem) {
      for (int t = range.begin; t < range.end; ++t)
        if (!mask.sees(qo_idx, block + t)) logits[t] = kHidden;
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
                        : kHidden;
    }
    for (int t = from; t < range.begin && t < to; ++t) logits[t] = kHidden;
    for (int t = range.end > from ? range.end : from; t < to; ++t) logits[t] = kHidden;
  }

  // A vector at a time: bit `start + t` of the mask is that of key t. No byte beyond the range's last bit is read.
  void hide_by_bits(int64_t start, float* logits, int from, int to, KeyRange range) const {
    if (range.empty()) return;
    const int64_t last = (start + range.end - 1) >> 3;
    vuint lane_bits;
    for (int lane = 0; lane < kLanes; ++lane) lane_bits[lane] = 1u << lane;
    for (int t = from; t < to; t += kLanes) {
      const int64_t byte = (start + t) >> 3;
      uint32_t word = 0;
      for (int i = 0; i <= (kLanes + 7) / 8; ++i)
        if (byte + i <= last) word |= static_cast<uint32_t>(mask.bits[byte + i]) << 8 * i;
      const vint seen = ((vuint{} + (word >> ((start + t) & 7))) & lane_bits) != 0;
      store(logits + t, select(seen, load(logits + t), splat(kHidden)));
    }
  }

  // Writes a finished row: to the output, or where pieces wait to be merged.
  void finish(int row, float* sums, float highest, float total) const {
    const float lse = total == 0 ? -math::inf : highest + math::ptx_log2(total);
    const float scale = !Variant::use_softmax ? 1.0f : total == 0 ? 0.0f : 1.0f / total;
    if (item.slot < 0) {
      write_row(params, variant, item.batch, item.qo_start, query(row), head(row), sums, scale * common.o_scale, lse);
      return;
    }
    const int64_t at = (static_cast<int64_t>(item.slot) * common.num_kv_heads + kv_head) * common.slot_rows + row;
    for_lanes<kDV>([&](int d, int count) { store(common.partial_o + at * kDV + d, load(sums + d) * scale, count); });
    common.partial_lse[at] = lse;
  }

  static void write_row(const Params& params, const Variant& variant, int32_t batch, int32_t qo_start, int32_t query,
                        int32_t head, float* sums, float scale, float lse) {
    const AttentionParams& common = params;
    const int64_t token = qo_start + query;
    auto* o = static_cast<typename Types::DTypeO*>(common.o) + token * common.o_row + head * common.o_head;
    for (int d = 0; d < kDV; d += kLanes) store(sums + d, load(sums + d) * scale);
    if constexpr (Variant::transforms_output)
      for (int d = 0; d < kDV; ++d)
        sums[d] = static_cast<float>(variant.OutputTransform(params, sums[d], batch, query, head));
    for_lanes<kDV>([&](int d, int count) { store(o + d, load(sums + d), count); });
    if (common.lse) common.lse[token * common.num_qo_heads + head] = lse;
  }
};

// Puts the pieces of one tile together, in their order.
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
    float highest = -math::inf, total = 0;
    for (int64_t i = 0, at = first; i < item.num_slots; ++i, at += step)
      highest = common.partial_lse[at] > highest ? common.partial_lse[at] : highest;
    alignas(64) float sums[Types::kSumStride] = {};
    for (int64_t i = 0, at = first; i < item.num_slots; ++i, at += step) {
      const float lse = common.partial_lse[at];
      const float weight = !Variant::use_softmax ? 1.0f : lse == -math::inf ? 0.0f : math::ptx_exp2(lse - highest);
      if (weight == 0) continue;
      total += weight;
      for_lanes<kDV>([&](int d, int count) {
        store(sums + d, load(sums + d) + load(common.partial_o + at * kDV + d, count) * weight);
      });
    }
    const int32_t query = static_cast<int32_t>(common.group.div(item.row_start + row));
    const float scale = Variant::use_softmax ? (total == 0 ? 0.0f : common.o_scale / total) : common.o_scale;
    Row::write_row(params, variant, item.batch, item.qo_start, query,
                   kv_head * group + item.row_start + row - query * group, sums, scale,
                   total == 0 ? -math::inf : highest + math::ptx_log2(total));
  }
}

// Throws the caller's mistake where the page table leads out of the cache.
inline void check_pages(const AttentionParams& params) {
  for (int32_t i = 0; params.kv.is_paged() && i < params.num_items(); ++i) {
    const WorkItem item = params.item(i);
    const int32_t size = static_cast<int32_t>(params.kv.page_size.divisor), first = params.kv.indptr[item.batch];
    for (int32_t page = item.kv_start / size; page * int64_t{size} < item.kv_end; ++page) {
      const int32_t index = params.kv.indices[first + page];
      if (index < 0 || index >= params.kv.num_pages)
        throw_value_error("kv_indices: got page " + std::to_string(index) + " for request " +
                          std::to_string(item.batch) + ", wanted one below the number of pages, " +
                          std::to_string(params.kv.num_pages));
    }
  }
}

template <typename Types, typename Params>
std::unique_ptr<const Rotation<Types::HEAD_DIM_QK>> rotation_of(const Params& params) {
  if constexpr (!Types::kRope) return nullptr;
  const double* numbers = numbers_of(params, 0);
  return std::make_unique<const Rotation<Types::HEAD_DIM_QK>>(
      numbers ? 1.0 / numbers[kRopeScale] : params.rope_rcp_scale,
      numbers ? 1.0 / numbers[kRopeTheta] : params.rope_rcp_theta);
}

// All merges of all heads; after all items.
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
