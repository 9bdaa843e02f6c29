// Attention in chunks: a query sees the keys of its own chunk, up to its own position. Llama 4's local layers
// have this mask. The causal mask and a window of chunk_size - 1 keys, which the call has too, bound the keys
// that are read.
//
// Parameter: chunk_size, a power of two. Chunks start at its multiples, counted from the first key of a
// request.
#pragma once

#include <flashinfer/attention/variants.h>

#include <cstdint>

namespace flashinfer {

template <bool use_logits_soft_cap>
struct ChunkMask : DefaultAttention<false, false, use_logits_soft_cap, false> {
  using Base = DefaultAttention<false, false, use_logits_soft_cap, false>;
  int32_t first_position;  // of the first query, among the keys

  template <typename Params>
  FLASHINFER_HD ChunkMask(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr)
      : Base(params, batch_idx, smem_ptr),
        first_position(static_cast<int32_t>(this->kv_len) - static_cast<int32_t>(this->qo_len)) {}

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const auto in_chunk = static_cast<uint32_t>(params.chunk_size) - 1;
    return ((static_cast<uint32_t>(first_position) + qo_idx) ^ kv_idx) <= in_chunk;
  })
};

}  // namespace flashinfer
