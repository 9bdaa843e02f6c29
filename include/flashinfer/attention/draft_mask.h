// Attention of draft tokens, as speculative decoding verifies them: the queries of a request are its last
// tokens, and a bit for each pair of them says what a query sees. A tree of drafts needs such a mask. All
// earlier keys are visible.
//
// Parameters: draft_mask [tokens of all requests, draft_words], bit i % 16 of word i / 16 for draft i of the
// request; maybe_draft_starts [batch + 1], the first token of each request, or null if all have equally many.
#pragma once

#include <flashinfer/attention/variants.h>

#include <cstdint>

namespace flashinfer {

struct DraftMask : DefaultAttention<false, false, false, false> {
  int32_t first_word, first_draft;  // of this request: in draft_mask, and among the keys

  template <typename Params>
  FLASHINFER_HD DraftMask(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr)
      : DefaultAttention(params, batch_idx, smem_ptr),
        first_draft(static_cast<int32_t>(kv_len) - static_cast<int32_t>(qo_len)) {
    auto start = static_cast<int32_t>(batch_idx * qo_len);
    if (params.maybe_draft_starts != nullptr) {  // inside of the mask, whatever the table holds
      const int32_t given = params.maybe_draft_starts[batch_idx];
      const int32_t most = static_cast<int32_t>(params.num_tokens) - static_cast<int32_t>(qo_len);
      start = given < 0 ? 0 : given < most ? given : most;
    }
    first_word = start * static_cast<int32_t>(params.draft_words);
  }

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const int32_t draft = static_cast<int32_t>(kv_idx) - first_draft;
    if (draft < 0) return true;
    const int32_t row = static_cast<int32_t>(qo_idx) * static_cast<int32_t>(params.draft_words);
    return (params.draft_mask[first_word + row + draft / 16] >> (draft % 16) & 1) != 0;
  })
};

}  // namespace flashinfer
