// One task of attention's gradients: a range of keys of one request and one KV head, and all tiles of queries
// that see it.
#pragma once

#include <algorithm>
#include <vector>

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/math.h>
#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cpu/attention/backward_block.h>
#include <flashinfer/cpu/attention/range.h>
#include <flashinfer/cpu/simd/math.h>

namespace flashinfer::cpu {

struct BackwardRequest {
  WorkItem item;  // batch, queries and keys; kv_start is the first key among all requests' keys
  int64_t mask_start;
  int32_t splits, split_keys;
};

template <typename T, bool kTransforms>
class BackwardTask {
 public:
  BackwardTask(const PrefillBackwardParams& params, const BackwardRequest& request, int32_t kv_head,
               BackwardScratch& scratch)
      : p_(params),
        item_(request.item),
        head_(kv_head),
        group_(params.num_qo_heads / params.num_kv_heads),
        rows_(request.item.qo_len * group_),
        s_(scratch),
        mask_(mask_params(params, request), request.item) {}

  // Compute keys [begin, end) of the request, with sums of dQ in partial number `split`.
  void run(int32_t begin, int32_t end, int32_t split) {
    float* sums = p_.memory + partial_row(p_, item_, head_, split) * p_.head_dim_qk;
    for (chunk_ = begin; chunk_ < end; chunk_ += kBackwardChunk) {
      count_ = std::min<int32_t>(end - chunk_, kBackwardChunk);
      pack_keys();
      std::fill_n(s_.dk, kBackwardChunk * s_.dim_qk, 0.0f);
      std::fill_n(s_.dv, kBackwardChunk * s_.dim_vo, 0.0f);
      for (row_start_ = 0; row_start_ < rows_; row_start_ += kBackwardRows)
        tile(sums + static_cast<int64_t>(row_start_) * p_.head_dim_qk, chunk_ == begin);
      unpack(s_.dk, p_.dk, p_.head_dim_qk, p_.sm_scale);
      unpack(s_.dv, p_.dv, p_.head_dim_vo, 1.0f);
    }
  }

  // Return the first row of the partial sums of dQ of a request, a KV head and a split.
  static int64_t partial_row(const PrefillBackwardParams& p, const WorkItem& item, int32_t kv_head, int32_t split) {
    const int64_t group = p.num_qo_heads / p.num_kv_heads;
    return (split * p.tokens + item.qo_start) * p.num_qo_heads + kv_head * group * item.qo_len;
  }

 private:
  static AttentionParams mask_params(const PrefillBackwardParams& params, const BackwardRequest& request) {
    AttentionParams result{};
    result.mask_mode = params.mask_mode, result.window_left = params.window_left;
    if (params.custom_mask) result.custom_mask = params.custom_mask + request.mask_start;
    return result;
  }

  int32_t query(int row) const { return (row_start_ + row) / group_; }
  int64_t token(int row) const { return int64_t{item_.qo_start} + query(row); }
  int32_t qo_head(int row) const { return head_ * group_ + (row_start_ + row) % group_; }

  Range seen(int first, int last, int32_t from, int32_t count) const {
    const int32_t begin = mask_.begin(query(first)) - from, end = mask_.end(query(last)) - from;
    return {begin > 0 ? begin : 0, end < count ? end : count};
  }

  // ---- a chunk of keys ------------------------------------------------------------------------------------

  void pack_keys() {
    const int padded = round_up(count_, kPanel);
    const std::vector<T> zeros(std::max(s_.dim_qk, s_.dim_vo));
    for (int t = 0; t < padded; t += kLanes) {
      const T *k[kLanes], *v[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int64_t row = int64_t{item_.kv_start} + chunk_ + t + i;
        k[i] = t + i < count_ ? p_.k.at<const T>(row, head_) : zeros.data();
        v[i] = t + i < count_ ? p_.v.at<const T>(row, head_) : zeros.data();
      }
      pack_columns(k, p_.head_dim_qk, s_.keys_by_column + t / kPanel * kPanel * s_.dim_qk + t % kPanel);
      pack_columns(v, p_.head_dim_vo, s_.values_by_column + t / kPanel * kPanel * s_.dim_vo + t % kPanel);
      for (int i = 0; i < kLanes; ++i)
        pack_row(k[i], p_.head_dim_qk, s_.keys + (t + i) * kPanel, kBackwardChunk * kPanel);
    }
  }

  void unpack(const float* panels, const HeadRows& to, int dim, float scale) const {
    for (int t = 0; t < count_; ++t) {
      T* row = to.at<T>(int64_t{item_.kv_start} + chunk_ + t, head_);
      for_lanes(dim, [&](int64_t d, int count) {
        store(row + d, load(panels + d / kPanel * kBackwardChunk * kPanel + t * kPanel + d % kPanel) * scale, count);
      });
    }
  }

  // ---- a tile of queries ----------------------------------------------------------------------------------

  void tile(float* sums, bool first) {
    tile_rows_ = std::min<int32_t>(rows_ - row_start_, kBackwardRows);
    const Range range = seen(0, tile_rows_ - 1, chunk_, count_);
    if (range.empty()) {
      if (first) std::fill_n(sums, tile_rows_ * p_.head_dim_qk, 0.0f);
      return;
    }
    load_rows();
    for (block_ = range.begin / kBackwardKeys * kBackwardKeys; block_ < range.end; block_ += kBackwardKeys) block();
    for (int row = 0; row < tile_rows_; ++row) {
      float* to = sums + row * p_.head_dim_qk;
      for_lanes(p_.head_dim_qk, [&](int64_t d, int count) {
        const vfloat more = load(s_.dq + d / kPanel * kBackwardRows * kPanel + row * kPanel + d % kPanel);
        store(to + d, first ? more : load(to + d, count) + more, count);
      });
    }
  }

  void load_rows() {
    const int padded = round_up(tile_rows_, kGemmRows);
    const std::vector<T> zeros(std::max(s_.dim_qk, s_.dim_vo));
    for (int row = 0; row < padded; ++row) {
      const bool there = row < tile_rows_;
      const int64_t at = there ? token(row) * p_.num_qo_heads + qo_head(row) : 0;
      const float lse = there ? p_.lse[at] : 0;
      s_.lse[row] = lse == -math::inf ? 0 : lse;
      s_.delta[row] = there ? delta(row) - p_.grad_lse[at] * math::log2e : 0;
      pack_row(there ? p_.q.at<const T>(token(row), qo_head(row)) : zeros.data(), p_.head_dim_qk, s_.q + row * kPanel,
               kBackwardRows * kPanel);
      pack_row(there ? p_.grad.at<const T>(token(row), qo_head(row)) : zeros.data(), p_.head_dim_vo,
               s_.grad + row * kPanel, kBackwardRows * kPanel);
    }
    std::fill_n(s_.dq, kBackwardRows * s_.dim_qk, 0.0f);
  }

  float delta(int row) const {
    const T *out = p_.out.at<const T>(token(row), qo_head(row)), *grad = p_.grad.at<const T>(token(row), qo_head(row));
    vfloat products{};
    for_lanes(p_.head_dim_vo, [&](int64_t d, int count) { products += load(out + d, count) * load(grad + d, count); });
    float sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += products[lane];
    return sum;
  }

  // ---- a block of a tile and keys -------------------------------------------------------------------------

  void block() {
    const int32_t keys = std::min<int32_t>(count_ - block_, kBackwardKeys);
    const int padded = round_up(tile_rows_, kGemmRows);
    // In whole panels: the range of the block that a group of rows sees, and the rows that see a panel.
    Range groups[kBackwardRows / kGemmRows], rows[kBackwardKeys / kPanel];
    for (Range& one : rows) one = {padded, 0};
    for (int row = 0; row < padded; row += kGemmRows) {
      const Range exact = seen(row, std::min(row + kGemmRows, tile_rows_) - 1, chunk_ + block_, keys);
      Range& group = groups[row / kGemmRows];
      group = exact.empty() ? Range{0, 0} : Range{exact.begin / kPanel * kPanel, round_up(exact.end, kPanel)};
      for (int t = group.begin; t < group.end; t += kPanel) {
        rows[t / kPanel].begin = std::min(rows[t / kPanel].begin, row);
        rows[t / kPanel].end = row + kGemmRows;
      }
    }
    for (int t = 0; t < keys; t += kPanel) {
      const Range seen_by = rows[t / kPanel];
      const int64_t panel = (block_ + t) / kPanel * kPanel;
      for (int row = seen_by.begin; row < seen_by.end; row += kGemmRows) {
        multiply_rows(p_.head_dim_qk, s_.q + row * kPanel, s_.keys_by_column + panel * s_.dim_qk,
                      s_.weights + row * kWeightStride + t);
        multiply_rows(p_.head_dim_vo, s_.grad + row * kPanel, s_.values_by_column + panel * s_.dim_vo,
                      s_.ds + row * kWeightStride + t);
      }
    }
    for (int row = 0; row < padded; ++row) {
      const Range group = groups[row / kGemmRows];
      if (!group.empty()) logits_to_weights(row, group, keys);
    }
    add_to_keys(rows, keys, s_.weights, s_.grad, p_.head_dim_vo, s_.dv);
    add_to_keys(rows, keys, s_.ds, s_.q, p_.head_dim_qk, s_.dk);
    add_to_queries(groups, padded);
  }

  static void multiply_rows(int dim, const float* rows, const float* panel, float* to) {
    multiply_block<kGemmRows, kPanelVectors, kPanel, 1, kWeightStride, true>(dim, rows, kBackwardRows * kPanel, panel,
                                                                             to);
  }

  // dV += P^T dO, or dK += dS^T Q
  void add_to_keys(const Range* rows, int keys, const float* left, const float* right, int dim, float* sums) const {
    for_panels(dim, [&](int d, auto vectors) {
      const int64_t column = d / kPanel;
      for (int t = 0; t < keys; t += kGemmRows) {
        const Range range = rows[t / kPanel];
        if (range.empty()) continue;
        multiply_block<kGemmRows, vectors, 1, kWeightStride, kPanel, false>(
            range.end - range.begin, left + range.begin * kWeightStride + t, kPanel * kWeightStride,
            right + (column * kBackwardRows + range.begin) * kPanel,
            sums + (column * kBackwardChunk + block_ + t) * kPanel);
      }
    });
  }

  // dQ += dS K
  void add_to_queries(const Range* groups, int padded) const {
    for_panels(p_.head_dim_qk, [&](int d, auto vectors) {
      const int64_t column = d / kPanel;
      for (int row = 0; row < padded; row += kGemmRows) {
        const Range range = groups[row / kGemmRows];
        if (range.empty()) continue;
        multiply_block<kGemmRows, vectors, kWeightStride, 1, kPanel, false>(
            range.end - range.begin, s_.ds + row * kWeightStride + range.begin, kPanel,
            s_.keys + (column * kBackwardChunk + block_ + range.begin) * kPanel,
            s_.dq + (column * kBackwardRows + row) * kPanel);
      }
    });
  }

  // P = 2^(S - lse) and dS = P * (dO V^T - delta), in place of Q K^T and dO V^T. 0 if the row sees nothing.
  void logits_to_weights(int row, Range group, int32_t keys) {
    float *weights = s_.weights + row * kWeightStride, *ds = s_.ds + row * kWeightStride;
    const Range range = row < tile_rows_ ? seen(row, row, chunk_ + block_, keys) : Range{0, 0};
    const bool custom = mask_.mode == MaskMode::kCustom && !range.empty();
    const int64_t first_bit = int64_t{query(row)} * mask_.kv_len + chunk_ + block_;
    const bool all = range.begin <= group.begin && range.end >= group.end && mask_.mode != MaskMode::kCustom;
    const vfloat lse = splat(s_.lse[row]), delta = splat(s_.delta[row]);
    const float scale = p_.sm_scale * math::log2e;
    vint lanes;
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
    for (int t = group.begin; t < group.end; t += kLanes) {
      vfloat x = load(weights + t), slope = splat(1.0f);
      if constexpr (kTransforms) {
        x = transformed(row, x, t, lanes, slope) - lse;
      } else {
        x = x * scale - lse;
      }
      vfloat weight = exp2(x), d_logit = weight * (load(ds + t) - delta);
      if constexpr (kTransforms) d_logit *= slope;
      if (!all) {
        const vint at = lanes + t, inside = (at >= range.begin) & (at < range.end);
        const vint shown = custom ? inside & visible_lanes(mask_.bits, first_bit, t, range) : inside;
        weight = select(shown, weight, vfloat{}), d_logit = select(shown, d_logit, vfloat{});
      }
      store(weights + t, weight);
      store(ds + t, d_logit);
    }
  }

  // Return a logit in base 2. `slope` becomes its derivative by the scaled product.
  vfloat transformed(int row, vfloat x, int t, vint lanes, vfloat& slope) const {
    x *= p_.sm_scale;
    if (p_.alibi_slopes) {
      const int32_t distance = chunk_ + block_ + t + item_.qo_len - item_.kv_len - query(row);
      x += __builtin_convertvector(lanes + distance, vfloat) * p_.alibi_slopes[qo_head(row)];
    }
    if (p_.logits_soft_cap > 0) {
      const vfloat capped = tanh(x * (1.0f / p_.logits_soft_cap));
      slope = 1.0f - capped * capped;
      x = capped * p_.logits_soft_cap;
    }
    return x * math::log2e;
  }

  const PrefillBackwardParams& p_;
  const WorkItem item_;
  const int32_t head_, group_, rows_;
  BackwardScratch& s_;
  const Mask mask_;
  int32_t chunk_ = 0, count_ = 0;          // first key and number of keys of the chunk
  int32_t row_start_ = 0, tile_rows_ = 0;  // first row and number of rows of the tile
  int32_t block_ = 0;                      // first key of the block, numbered in the chunk
};

}  // namespace flashinfer::cpu
