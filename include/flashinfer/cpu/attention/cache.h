// Addresses of rows of keys and values in a cache, and a check of the page table.
#pragma once

#include <string>

#include <flashinfer/attention/params.h>
#include <flashinfer/common/dispatch.h>

namespace flashinfer::cpu {

// Find `count` rows of keys or values from token `begin` of a request, whose pages start at `first`.
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

// Throw if the page table names a page outside of the cache.
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

}  // namespace flashinfer::cpu
