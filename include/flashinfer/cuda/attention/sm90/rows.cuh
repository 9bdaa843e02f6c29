// The rows of a warpgroup, the tiles of keys that they see, and the masks and variants of a tile's logits.
#pragma once

#include <cstdint>

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/params.h>
#include <flashinfer/attention/variant.h>
#include <flashinfer/cuda/attention/sm90/shape.cuh>
#include <flashinfer/cuda/attention/sm90/softmax.cuh>
#include <flashinfer/cuda/attention/softmax.cuh>

namespace flashinfer::cuda::sm90 {

// Return a warp's rows of an item. They end at the end of the tile.
template <typename S, typename Variant = AttentionVariantBase>
__device__ __forceinline__ WarpRows<S> warp_rows(const AttentionParams& params, const Work& work,
                                                 const Variant& variant = {}) {
  WarpRows<S> rows(params, variant, work, work.head);
  rows.end_row = min(rows.end_row, work.row_start + params.tile_rows);
  return rows;
}

// Return the scales of 8-bit queries, keys and values: the factors of the logits of all query heads, then the
// factors of their outputs.
template <typename P>
__device__ __forceinline__ auto head_scales_of(const P& params, int) -> decltype(params.maybe_head_scales) {
  return params.maybe_head_scales;
}
template <typename P>
__device__ __forceinline__ const float* head_scales_of(const P&, long) {  // a user's variant
  return nullptr;
}

// Return the fp8 scale of this thread's row: of Q K^T if `first` is 0, of P V if `first` is the number of
// query heads.
template <typename S, typename P>
__device__ __forceinline__ float head_scale(const P& params, const WarpRows<S>& rows, int half, int32_t first) {
  const float* scales = head_scales_of(params, 0);
  if (scales == nullptr) return 1.0f;
  int32_t qo_idx, qo_head;
  rows.locate(rows.row(0, half), qo_idx, qo_head);
  return scales[first + qo_head];
}

template <typename S, typename Variant, typename P>
__device__ __forceinline__ Softmax<S::kFp8> softmax_of(const P& params, const Work& work, const Variant& variant) {
  Softmax<S::kFp8> softmax{};
  softmax.scales[0] = softmax_scale<false>(variant);
  if constexpr (S::kFp8) {
    const WarpRows<S> rows = warp_rows<S>(params, work);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.logits[half] = head_scale<S>(params, rows, half, 0);
      softmax.scales[half] =
          fmaxf(softmax_scale<false>(variant) * (Variant::transforms_logits ? 1.0f : softmax.logits[half]), 1e-30f);
    }
  }
  return softmax;
}

// Tiles of an item that a warpgroup's rows see: [first, end). In [whole_first, whole_end), all rows see whole
// tiles. In the last tile, only the first `left` keys are visible to any row.
struct TileRange {
  int32_t first, end, whole_first, whole_end, left;

  FLASHINFER_HD bool is_whole(int32_t tile) const { return tile >= whole_first && tile < whole_end; }
};

template <typename S, typename Variant>
FLASHINFER_HD TileRange tiles_of(const AttentionParams& params, const Work& work, const Variant& variant,
                                 int warpgroup) {
  const int32_t first_row = work.row_start + 64 * warpgroup;
  const int32_t rows = min(work.qo_len * static_cast<int32_t>(params.group.divisor), work.row_start + params.tile_rows);
  TileRange range{0, 0, 0, 0, 0};
  if (first_row >= rows || work.tiles == 0) return range;
  Mask mask(params, work);
  narrow(mask, variant);
  const auto first = static_cast<int32_t>(params.group.div(first_row));
  const auto last = static_cast<int32_t>(params.group.div(min(first_row + 64, rows) - 1));
  // Keys of the item, numbered from its first one.
  const int32_t start = max(mask.begin(first), work.kv_start) - work.first_key;
  const int32_t end = min(mask.end(last), work.kv_end) - work.first_key;
  if (end <= start) return range;
  const int32_t whole_start = max(mask.begin(last), work.kv_start) - work.first_key;
  int32_t whole_end = min(mask.end(first), work.kv_end) - work.first_key;
  if (mask.mode == MaskMode::kMultiItem) whole_end = min(whole_end, mask.prefix_len - work.first_key);
  range.first = start / S::kKeys, range.end = (end + S::kKeys - 1) / S::kKeys;
  range.whole_first = (whole_start + S::kKeys - 1) / S::kKeys, range.whole_end = max(whole_end, 0) / S::kKeys;
  range.left = end - (range.end - 1) * S::kKeys;
  return range;
}

// Multi-item scoring: a query after the prefix sees the prefix and its own scored item, and no key between
// them. Return the scored item's first key. A result at or before the prefix's end means: nothing to mask.
template <typename S>
__device__ __forceinline__ int32_t scored_item_start(const WarpRows<S>& rows, int half) {
  const Mask& mask = rows.mask;
  int32_t qo_idx, qo_head;
  rows.locate(rows.row(0, half), qo_idx, qo_head);
  const int32_t position = mask.kv_len - mask.qo_len + qo_idx;
  if (position < mask.prefix_len) return mask.prefix_len;
  return position + 1 - mask.token_pos[position - mask.prefix_len];  // of a delimiter: the key after it
}

template <typename S>
__device__ __forceinline__ void mask_other_items(float (&s)[S::kKeys / 2], const WarpRows<S>& rows, int32_t tile_start,
                                                 float masked_value) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t scored_item = scored_item_start<S>(rows, half);
    const int32_t first = rows.mask.prefix_len - WarpRows<S>::key(tile_start, 0, 0);
    if (scored_item <= rows.mask.prefix_len) continue;
    const auto between = static_cast<uint32_t>(scored_item - rows.mask.prefix_len);
#pragma unroll
    for (int i = 2 * half; i < S::kKeys / 2; i += i % 2 == 0 ? 1 : 3)
      s[i] = static_cast<uint32_t>(i / 4 * 8 + i % 2 - first) < between ? masked_value : s[i];
  }
}

// A lane has two elements of every eight keys of a row. Return one bit for each of its elements `first` to
// `first` + 31, set if the element's key is less than `key`. Keys count from the lane's first.
__device__ __forceinline__ uint32_t elements_before(int32_t key, int first) {
  const auto from = static_cast<uint32_t>(max(key, 0));
  const auto elements = static_cast<int32_t>(from / 8 * 2 + min(from % 8, 2u));
  return __funnelshift_lc(~0u, 0u, static_cast<uint32_t>(max(elements - first, 0)));
}

// Apply masks and variants to logits. kMasked: at least one row does not see the whole tile at key
// `tile_start`.
template <bool kMasked, typename Variant, typename S, typename P>
__device__ __forceinline__ void prepare_logits(float (&s)[S::kKeys / 2], const P& params, const Variant& variant,
                                               const Work& work, int32_t tile_start, const float* factors) {
  if constexpr (!kMasked && !Variant::transforms_logits && !Variant::masks_logits) return;
  const WarpRows<S> rows = warp_rows<S>(params, work, variant);
  if constexpr (Variant::transforms_logits && S::kFp8) {
#pragma unroll
    for (int i = 0; i < S::kKeys / 2; ++i) s[i] *= factors[i / 2 % 2];
  }
  if constexpr (!kMasked && transforms_pairs<Variant> && !Variant::masks_logits && !S::kFp8) {
#pragma unroll
    for (int i = 0; i < S::kKeys / 2; i += 2) variant.transform_pair(s[i], s[i + 1]);
  } else if constexpr (Variant::transforms_logits) {
    transform_tile<!kMasked, false>(reinterpret_cast<Products<S>&>(s), params, variant, rows, tile_start);
  }
  if constexpr (Variant::transforms_logits && Variant::use_softmax) {
    // Row maxima are taken of unscaled logits, so a negative scale needs negated logits.
    if (variant.sm_scale_log2 < 0) {
#pragma unroll
      for (int i = 0; i < S::kKeys / 2; ++i) s[i] = -s[i];
    }
  }
  const float masked_value = Variant::use_softmax ? -math::inf : 0.0f;
  if constexpr (Variant::masks_logits)
    mask_elements<Variant, S>(reinterpret_cast<Products<S>&>(s), params, variant, rows, tile_start, masked_value);
  if constexpr (kMasked) {
    // One instruction (R2P) turns seven bits into predicates. Variants and 8-bit types leave no registers for
    // words of bits.
    constexpr bool kByBits = !Variant::transforms_logits && !Variant::masks_logits && !S::kFp8;
    const Mask& mask = rows.mask;
    const int32_t lane_key = WarpRows<S>::key(tile_start, 0, 0), window = min(mask.window_left, mask.kv_len);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto qo_idx = static_cast<int32_t>(params.group.div(rows.row(0, half)));
      const int32_t start = max(mask.kv_len - mask.qo_len + qo_idx - window, work.kv_start) - lane_key;
      const int32_t end = min(mask.end(qo_idx), work.kv_end) - lane_key;
      const bool has_scored_items = kByBits && mask.mode == MaskMode::kMultiItem;
      const int32_t scored_item = has_scored_items ? scored_item_start<S>(rows, half) : 0;
      uint32_t seen = 0;
#pragma unroll
      for (int e = 0; e < S::kKeys / 4; ++e) {
        float& element = s[e / 2 * 4 + 2 * half + e % 2];
        if constexpr (kByBits) {
          if (e % 32 == 0) {
            seen = elements_before(end, e) & ~elements_before(start, e);
            if (has_scored_items)
              seen &= elements_before(mask.prefix_len - lane_key, e) | ~elements_before(scored_item - lane_key, e);
          }
          element = seen >> e % 32 & 1 ? element : masked_value;
        } else {
          const int32_t key = e / 2 * 8 + e % 2;
          element = key >= start && key < end ? element : masked_value;
        }
      }
    }
    if (!kByBits && mask.mode == MaskMode::kMultiItem) mask_other_items<S>(s, rows, tile_start, masked_value);
  }
}

}  // namespace flashinfer::cuda::sm90
