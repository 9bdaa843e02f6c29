// Parameters of attention kernels, shared by the bindings and the kernels of every backend.
//
// O = softmax(S) V,   S = sm_scale * Q K^T,   lse = log2 of sum_j 2^(S_j log2 e)
// The queries of a request attend to its keys. Query head h reads KV head h / group, with group =
// num_qo_heads / num_kv_heads. Row r of a request and KV head is query token r / group with query head
// kv_head * group + r % group. Kernels work on tiles of rows, so that one read of a key serves the whole
// group.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/fast_div.h>
#include <flashinfer/common/rows.h>

#include <cstdint>

namespace flashinfer {

// kMultiItem: the key sequence is a prefix and then items. Each item sees the prefix and itself.
enum class MaskMode : int32_t { kNone, kCausal, kCustom, kMultiItem };
enum class PosEncodingMode : int32_t { kNone, kRopeLlama, kAlibi };

// Keys and values of all requests, strides in elements. Row of token t of request b:
//   paged:   row t % page_size of page indices[indptr[b] + t / page_size],
//   ragged:  row indptr[b] + t (t if indptr is null: one request).
struct KvCache {
  const void *k, *v;
  int64_t k_page, k_row, k_head;  // strides; k_page is unused in a ragged cache
  int64_t v_page, v_row, v_head;
  const int32_t* indices;  // null: ragged
  const int32_t* indptr;
  FastDiv page_size;  // in tokens
  int64_t num_pages;  // pages of the cache (rows if ragged), the bound of an index

  FLASHINFER_HD bool is_paged() const { return indices != nullptr; }

  // Find the page of token t of a request and the row in it. `first` is indptr[b].
  FLASHINFER_HD void locate(int32_t first, int32_t t, int64_t& page, int64_t& row) const {
    if (is_paged()) {
      uint32_t number, rest;
      page_size.divmod(static_cast<uint32_t>(t), number, rest);
      page = indices[first + static_cast<int32_t>(number)], row = rest;
    } else {
      page = 0, row = static_cast<int64_t>(first) + t;
    }
  }
  FLASHINFER_HD int64_t k_offset(int64_t page, int64_t row) const { return page * k_page + row * k_row; }
  FLASHINFER_HD int64_t v_offset(int64_t page, int64_t row) const { return page * v_page + row * v_row; }
};

// A tile of rows of one request and a range of its keys: the work of one CTA (one CPU task) for one KV head.
struct alignas(32) WorkItem {
  int32_t batch;             // number of the request
  int32_t qo_start, qo_len;  // tokens [qo_start, qo_start + qo_len) of q
  int32_t kv_len;            // keys of the request
  int32_t row_start;         // first row of the tile
  int32_t kv_start, kv_end;  // [kv_start, kv_end): masks hide all other keys from every row
  int32_t slot;              // index of the item's slot; -1: the result is final and goes to the output
};

// A tile whose keys are split over slots [first_slot, first_slot + num_slots). They are merged in that order.
struct alignas(32) MergeItem {
  int32_t batch, qo_start, qo_len, row_start, first_slot, num_slots, unused[2];
};

// Schedule of one request without a plan: tiles of rows times equal splits of the keys.
struct SingleRequest {
  int32_t qo_len, kv_len;
  int32_t num_tiles, num_chunks, kv_chunk;  // kv_chunk tokens in each split except the last
};

// m and l of a partial state: the reference m in base 2, and l = sum of 2^(S - m). l is 0 if the split saw no
// key. One float32 lse = m + log2(l) would lose the digits of l if m is large.
struct alignas(8) PartialSoftmax {
  float m, l;
};

struct AttentionParams {
  static constexpr bool kProfiler{false};  // see common/profiler.h

  const void* q;          // [tokens, num_qo_heads, head_dim_qk], last dimension contiguous
  int64_t q_row, q_head;  // strides in elements
  void* o;                // [tokens, num_qo_heads, head_dim_vo], last dimension contiguous
  int64_t o_row, o_head;
  float* lse;  // [tokens, num_qo_heads] contiguous, log2 of the sum of 2^S; null: not computed
  KvCache kv;
  int64_t num_tokens;  // tokens of q and o, over all requests
  int32_t num_qo_heads, num_kv_heads;
  FastDiv group;  // num_qo_heads / num_kv_heads

  MaskMode mask_mode;
  int32_t window_left;                 // a query sees this many keys to its left, and itself; -1: all
  const uint8_t* custom_mask;          // bits, least significant first: bit qo_idx * kv_len + kv_idx of the request
  const int32_t* mask_indptr;          // [batch + 1] in bytes; null: one mask. Without a plan: [masks + 1]
  int32_t heads_per_mask;              // without a plan: consecutive KV heads that share a mask
  const uint32_t* prefix_len;          // kMultiItem: [batch], keys of the prefix
  const uint16_t* token_pos_in_items;  // kMultiItem: [batch, token_pos_in_items_len], 0 at a delimiter
  int32_t token_pos_in_items_len;

  float o_scale;  // factor of the output: the scale of quantised values
  // kRopeLlama: the angle of pair i at position p is p * rope_rcp_scale * rope_rcp_theta^(2 i / head_dim_qk).
  // Doubles, because floats are off by 1e-4 at position 8192.
  double rope_rcp_scale, rope_rcp_theta;

  // The schedule: lists of plan() (attention/schedule.h), or one request (items == nullptr).
  const WorkItem* items;
  const MergeItem* merges;
  const int32_t* counts;  // {number of items, number of merges}, at most max_items and max_merges
  int32_t max_items, max_merges;
  const int32_t *qo_lens, *kv_lens;  // [batch]
  SingleRequest single;
  int32_t tile_rows;           // rows of a tile
  int32_t slot_rows;           // rows stored per slot
  float* partial_o;            // [slots, num_kv_heads, slot_rows, head_dim_vo], sums of 2^(S - m) V
  PartialSoftmax* partial_ml;  // [slots, num_kv_heads, slot_rows]
  // [max_merges, num_kv_heads] of a plan: the number of finished splits of a tile, in kernels that count
  // them. 0 between two launches. Null without a plan.
  uint32_t* tickets;

  FLASHINFER_HD int32_t get_qo_len(int32_t batch_idx) const { return items ? qo_lens[batch_idx] : single.qo_len; }
  FLASHINFER_HD int32_t get_kv_len(int32_t batch_idx) const { return items ? kv_lens[batch_idx] : single.kv_len; }

  FLASHINFER_HD int32_t num_items() const { return items ? counts[0] : single.num_tiles * single.num_chunks; }
  FLASHINFER_HD int32_t num_merges() const { return items ? counts[1] : single.num_chunks > 1 ? single.num_tiles : 0; }

  FLASHINFER_HD WorkItem item(int32_t i) const {
    if (items) return items[i];
    const int32_t tile = i / single.num_chunks, chunk = i % single.num_chunks;
    const int32_t start = chunk * single.kv_chunk, end = start + single.kv_chunk;
    WorkItem one{};
    one.qo_len = single.qo_len, one.kv_len = single.kv_len, one.row_start = tile * tile_rows;
    one.kv_start = start < single.kv_len ? start : single.kv_len;
    one.kv_end = chunk + 1 < single.num_chunks && end < single.kv_len ? end : single.kv_len;
    one.slot = single.num_chunks > 1 ? i : -1;
    return one;
  }

  FLASHINFER_HD MergeItem merge(int32_t i) const {
    if (items) return merges[i];
    MergeItem one{};
    one.qo_len = single.qo_len, one.row_start = i * tile_rows;
    one.first_slot = i * single.num_chunks, one.num_slots = single.num_chunks;
    return one;
  }
};

// Numbers that are unknown at launch. If a variant has maybe_numbers and it is not null, its elements replace
// the parameters of these names. Scale and theta are stored there directly, not as reciprocals.
enum Number { kSmScale, kLogitsSoftCap, kRopeScale, kRopeTheta };

template <typename Params>
FLASHINFER_HD auto numbers_of(const Params& params, int) -> decltype(static_cast<const double*>(params.maybe_numbers)) {
  return params.maybe_numbers;
}
template <typename Params>
FLASHINFER_HD const double* numbers_of(const Params&, long) {  // a user's variant has none
  return nullptr;
}

}  // namespace flashinfer
