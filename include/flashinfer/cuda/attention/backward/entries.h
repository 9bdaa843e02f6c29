// The table of a batch's requests for the kernels of attention's gradients, made on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cuda/attention/backward/shape.cuh>

namespace flashinfer::cuda {

// Return all requests, those with the most logits first.
inline std::vector<BackwardEntry> backward_entries(const PrefillBackwardParams& p) {
  std::vector<BackwardEntry> entries(p.batch_size);
  int64_t kv_start = 0, mask_start = 0;
  for (int64_t b = 0; b < p.batch_size; ++b) {
    BackwardEntry& entry = entries[b];
    entry.qo_start = p.qo_indptr ? p.qo_indptr[b] : 0;
    entry.qo_len = static_cast<int32_t>(p.qo_indptr ? p.qo_indptr[b + 1] - entry.qo_start : p.tokens);
    entry.kv_start = static_cast<int32_t>(kv_start);
    entry.kv_len = static_cast<int32_t>(p.kv_lens ? p.kv_lens[b] : p.kv_tokens);
    entry.mask_start = mask_start;
    if (int64_t{entry.qo_len} + entry.kv_len >= int64_t{1} << 30)
      throw std::runtime_error("prefill_backward: a request has 2^30 queries and keys or more");
    kv_start += entry.kv_len;
    mask_start += (int64_t{entry.qo_len} * entry.kv_len + 7) / 8;
  }
  std::stable_sort(entries.begin(), entries.end(), [](const BackwardEntry& a, const BackwardEntry& b) {
    return int64_t{a.qo_len} * a.kv_len > int64_t{b.qo_len} * b.kv_len;
  });
  return entries;
}

}  // namespace flashinfer::cuda
