// Writes to paged caches: parameters of the kernels. Elements move as bytes, and all strides are in bytes.
#pragma once

#include <flashinfer/common/rows.h>

#include <cstdint>

namespace flashinfer {

// A tensor and the cache that it is appended to: keys, values, compressed KV or rotary keys.
struct PagedStream {
  const char* tokens;
  char* cache;
  int64_t token_stride, token_head_stride;
  int64_t page_stride, slot_stride, head_stride;
  int64_t num_heads;
  int64_t row_bytes;  // one head of one token
};

// Slots of new tokens: token t goes to position positions[t] of request batch_indices[t].
struct PageTable {
  const int32_t *batch_indices, *positions;  // [num_tokens]
  const int32_t *kv_indices, *kv_indptr;     // [num_indices], [batch_size + 1]
  int64_t num_tokens, num_indices, num_pages, batch_size;
  int32_t page_size;
  const char* op;  // operator name, for messages
};

struct AppendParams : PageTable {
  PagedStream streams[2];
};

struct Slot {
  int64_t page, entry;  // page -1: the cache has no such slot
};

FLASHINFER_HD Slot find_slot(const PageTable& p, int64_t token) {
  const int32_t request = p.batch_indices[token], position = p.positions[token];
  if (request < 0 || request >= p.batch_size || position < 0) return {-1, 0};
  const int64_t at = int64_t{p.kv_indptr[request]} + position / p.page_size;
  if (at < 0 || at >= p.num_indices || at >= p.kv_indptr[request + 1]) return {-1, 0};
  const int32_t page = p.kv_indices[at];
  if (page < 0 || page >= p.num_pages) return {-1, 0};
  return {page, position % p.page_size};
}

// Request and position of each of `num_tokens` appended tokens, the last tokens of their requests.
struct PositionsParams {
  const int32_t* append_indptr;  // [batch_size + 1]
  const int32_t* seq_lens;       // [batch_size]
  int32_t *batch_indices, *positions;
  int64_t num_tokens, batch_size;
  bool padded;  // tokens after the last request are padding, not an error
};

// offsets[indptr[b] + i] = block_indices[block_indptr[b] + i / block_size] * stride_block + i % block_size *
// stride_n, for the kv_lens[b] entries i of request b.
struct BlockOffsetsParams {
  const int32_t *block_indices, *block_indptr, *indptr, *kv_lens;
  int32_t* offsets;
  int64_t num_indices, num_offsets, batch_size;
  int64_t stride_block, stride_n, block_size;
};

struct Launch;
void append_paged(const AppendParams& params, const Launch& launch);
void batch_indices_positions(const PositionsParams& params, const Launch& launch);
void block_offsets(const BlockOffsetsParams& params, const Launch& launch);

}  // namespace flashinfer
