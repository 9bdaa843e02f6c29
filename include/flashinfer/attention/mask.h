// Masks: the keys that a query sees, before a variant hides any.
#pragma once

#include <flashinfer/attention/params.h>

namespace flashinfer {

// Masks of one work item and one KV head. Causal masks and windows are aligned at the end: the last query has
// the position of the last key.
struct Mask {
  MaskMode mode;
  int32_t qo_len, kv_len, window_left;  // window_left: kv_len without a window
  const uint8_t* bits;                  // kCustom: mask bits of this request
  int32_t prefix_len;                   // kMultiItem
  const uint16_t* token_pos;

  // Only the bits of a custom mask depend on the KV head.
  FLASHINFER_HD Mask(const AttentionParams& params, const WorkItem& item, int32_t kv_head = 0)
      : mode(params.mask_mode),
        qo_len(item.qo_len),
        kv_len(item.kv_len),
        window_left(params.window_left < 0 ? item.kv_len + item.qo_len : params.window_left),
        bits(nullptr),
        prefix_len(0),
        token_pos(nullptr) {
    if (mode == MaskMode::kCustom) {
      bits = bits_of(params, item, kv_head);
    } else if (mode == MaskMode::kMultiItem) {
      prefix_len = static_cast<int32_t>(params.prefix_len[item.batch]);
      token_pos = params.token_pos_in_items + static_cast<int64_t>(item.batch) * params.token_pos_in_items_len;
    }
  }

  FLASHINFER_HD static const uint8_t* bits_of(const AttentionParams& params, const WorkItem& item, int32_t kv_head) {
    if (!params.mask_indptr) return params.custom_mask;
    return params.custom_mask + params.mask_indptr[params.items ? item.batch : kv_head / params.heads_per_mask];
  }

  // Queries first ... last (numbered in the request) see no key outside of [begin, end).
  FLASHINFER_HD int32_t begin(int32_t first) const {
    const int64_t start = static_cast<int64_t>(kv_len) - qo_len + first - window_left;
    return start < 0 ? 0 : start < kv_len ? static_cast<int32_t>(start) : kv_len;
  }
  FLASHINFER_HD int32_t end(int32_t last) const {
    if (mode != MaskMode::kCausal && mode != MaskMode::kMultiItem) return kv_len;
    const int32_t stop = kv_len - qo_len + last + 1;
    return stop < 0 ? 0 : stop < kv_len ? stop : kv_len;
  }

  // Return true if queries first ... last all see every key of [kv_begin, kv_end). Such a block needs no
  // sees().
  FLASHINFER_HD bool all_visible(int32_t first, int32_t last, int32_t kv_begin, int32_t kv_end) const {
    if (kv_end > kv_len || mode == MaskMode::kCustom || mode == MaskMode::kMultiItem) return false;
    if (mode == MaskMode::kCausal && kv_end > kv_len - qo_len + first + 1) return false;
    return kv_begin >= begin(last);
  }

  FLASHINFER_HD bool sees(int32_t qo_idx, int32_t kv_idx) const {
    if (kv_idx >= kv_len || qo_idx >= qo_len) return false;
    const int32_t position = kv_len - qo_len + qo_idx;  // position of the query among the keys
    if (static_cast<int64_t>(kv_idx) + window_left < position) return false;
    switch (mode) {
      case MaskMode::kNone: return true;
      case MaskMode::kCausal: return kv_idx <= position;
      case MaskMode::kCustom: {
        const int64_t bit = static_cast<int64_t>(qo_idx) * kv_len + kv_idx;
        return bits[bit >> 3] >> (bit & 7) & 1;
      }
      case MaskMode::kMultiItem: {
        if (kv_idx > position) return false;
        if (position < prefix_len || kv_idx < prefix_len) return true;
        // token_pos counts from the delimiter before an item: keys further left belong to other items.
        const int32_t in_item = token_pos[position - prefix_len];
        return in_item > 0 && kv_idx > position - in_item;
      }
    }
    return false;
  }
};

}  // namespace flashinfer
