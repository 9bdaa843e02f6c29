// Host side of the Hopper attention kernel: work limits, tensor maps and launches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include <flashinfer/attention/config.h>
#include <flashinfer/cuda/host/tensor_map.h>
#include <flashinfer/cuda/attention/merge.cuh>
#include <flashinfer/cuda/attention/sm90/kernel.cuh>
#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/host/launch.cuh>

namespace flashinfer::cuda::sm90 {

// Return the rows of a tile: whole tokens, so that a tile's queries are one box.
template <typename S>
int32_t tile_rows(int32_t group) {
  return S::kRows / group * group;
}

template <typename S>
WorkLimits limits_of(int32_t group, int device) {
  return {tile_rows<S>(group), device_info(device).num_sms, 4 * S::kKeys, S::kKeys, 0, 0, kUnsplitKeys};
}

// Return a map of queries or outputs, whose box has `rows` rows.
template <typename T, int kChunkRowBytes>
CUtensorMap map_of_rows(const AttentionParams& params, const void* data, int head_dim, int64_t row, int64_t head,
                        int rows) {
  const auto group = static_cast<int64_t>(params.group.divisor);
  return tensor_map<kChunkRowBytes, 4>(
      map_type<T>(), sizeof(T),
      {data,
       {static_cast<uint64_t>(head_dim), static_cast<uint64_t>(group), static_cast<uint64_t>(params.num_tokens),
        static_cast<uint64_t>(params.num_kv_heads)},
       {1, head, row, group * head},
       {kChunkRowBytes / sizeof(T), static_cast<uint32_t>(group), static_cast<uint32_t>(rows / group), 1}});
}

template <typename S>
CUtensorMap map_of_keys(const AttentionParams& params, const void* data, int head_dim, int64_t page, int64_t row,
                        int64_t head) {
  const KvCache& kv = params.kv;
  const uint64_t rows = kv.is_paged() ? kv.page_size.divisor : kv.num_pages, pages = kv.is_paged() ? kv.num_pages : 1;
  // An empty cache has no memory, and a map needs an address.
  return tensor_map<S::kChunkRowBytes, 4>(
      map_type<typename S::DTypeKV>(), S::kElementBytes,
      {kv.num_pages > 0 ? data : params.q,
       {static_cast<uint64_t>(head_dim), rows, static_cast<uint64_t>(params.num_kv_heads), pages},
       {1, row, head, kv.is_paged() ? page : row},
       {S::kChunkElements,
        is_gathered(kv) ? 1u
        : kv.is_paged() ? kPageKeys
                        : static_cast<uint32_t>(S::kKeys),
        1, 1}});
}

template <typename S>
TensorMaps maps_of(const AttentionParams& params) {
  const auto group = static_cast<int>(params.group.divisor);
  const KvCache& kv = params.kv;
  // If 64 rows are not whole tokens, outputs are stored without a map.
  const int output_rows = std::max(64 / group, 1) * group;
  return {map_of_rows<typename S::DTypeQ, S::kChunkRowBytes>(params, params.q, S::kDQ, params.q_row, params.q_head,
                                                             tile_rows<S>(group)),
          map_of_keys<S>(params, kv.k, S::kDQ, kv.k_page, kv.k_row, kv.k_head),
          map_of_keys<S>(params, kv.v, S::kDV, kv.v_page, kv.v_row, kv.v_head),
          map_of_rows<typename S::DTypeO, 128>(params, params.o, S::kDV, params.o_row, params.o_head, output_rows)};
}

// Return the number of KV heads that are processed together: those whose keys and values fit into 16 MiB. An
// H100 has an L2 cache of 50 MB in two halves, each of which caches the reads of its multiprocessors. The
// rest is for queries and outputs. The host does not know the lengths of a plan, so it takes the size of the
// whole paged cache. The result is 1 for a large cache.
template <typename S, typename P>
int heads_per_section(const P& params) {
  constexpr int64_t kCacheBytes = 16 << 20;
  const int64_t keys = params.kv.is_paged() ? params.kv.num_pages * params.kv.page_size.divisor : params.kv.num_pages;
  const int64_t bytes = keys * (S::kDQ + S::kDV) * S::kElementBytes;
  int heads = params.num_kv_heads;
  while (heads > 1 && (heads * bytes > kCacheBytes || params.num_kv_heads % heads != 0)) --heads;
  return heads;
}

// Reject options that the kernel would silently ignore.
inline void require_served(const AttentionParams& params) {
  if (params.mask_mode == MaskMode::kCustom)
    throw std::runtime_error("mask_mode: got a custom mask, wanted none, causal or multi-item scoring with fa3");
}

template <typename Variant, typename S, typename P>
void launch_attention(const P& params, const Launch& where) {
  require_served(params);
  const int64_t items = params.items ? params.max_items : params.num_items(), all = items * params.num_kv_heads;
  if (all > INT32_MAX) throw std::runtime_error("attention: more than 2147483647 tiles");
  const int64_t ctas = std::min<int64_t>(all, device_info(where.device).num_sms);  // one per multiprocessor
  Kernel<attention_kernel<Variant, S, P>>::launch(dim3(static_cast<unsigned>(ctas)), dim3(S::kThreads), S::kSharedBytes,
                                                  where, with_tracks(params, ctas, S::kThreads), maps_of<S>(params),
                                                  heads_per_section<S>(params));
  launch_merges<Variant, typename S::Types>(params, where);
}

}  // namespace flashinfer::cuda::sm90
