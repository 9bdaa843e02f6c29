// Host side of the Hopper kernel of attention's gradients: conditions, workspace, tensor maps and launches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cuda/attention/backward/entries.h>
#include <flashinfer/cuda/host/tensor_map.h>
#include <flashinfer/cuda/attention/backward/rows.cuh>
#include <flashinfer/cuda/attention/backward/sm90/kernel.cuh>
#include <flashinfer/cuda/attention/backward/sm90/rows.cuh>
#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/host/launch.cuh>

namespace flashinfer::cuda::sm90 {

// Number the tiles of queries of all requests in the order of `entries`. Return how many there are.
template <typename S>
int64_t number_tiles(std::vector<BackwardEntry>& entries) {
  int64_t queries = 0;
  for (BackwardEntry& entry : entries) {
    entry.first_query_tile = static_cast<int32_t>(queries);
    queries += (int64_t{entry.qo_len} + S::kQueries - 1) / S::kQueries;
  }
  return queries;
}

// Return the number of work items that share the queries of a tile of keys. Double it until no item has more
// than 1.1 times the mean work of an SM, or until it would no longer divide the query heads per KV head.
template <typename S>
int32_t splits_of(const PrefillBackwardParams& p, const std::vector<BackwardEntry>& entries, int device) {
  const int32_t group = p.num_qo_heads / p.num_kv_heads, blocks = device_info(device).num_sms;
  int64_t longest = 0, all = 0;
  for (const BackwardEntry& entry : entries) {
    const BackwardMask mask(p, entry);
    for (int32_t row = 0; row < entry.kv_len; row += S::kKeys) {
      int32_t begin, end;
      mask.columns<true>(row, std::min(row + S::kKeys, entry.kv_len) - 1, begin, end);
      const int64_t steps = int64_t{(end + S::kQueries - 1) / S::kQueries - begin / S::kQueries} * group;
      longest = std::max(longest, steps), all += steps * p.num_kv_heads;
    }
  }
  int32_t splits = 1;
  while (2 * splits <= group && group % (2 * splits) == 0 && longest * blocks * 10 > all * splits * 11) splits *= 2;
  return splits;
}

inline int64_t whole_lines(int64_t floats) { return (floats + 31) / 32 * 32; }

// Floats of each part of p.memory. rows: lse and delta of each query; queries: sums of dQ; keys: partial sums
// of dK and dV.
template <typename S>
struct MemorySizes {
  int64_t counters, rows, queries, keys;

  MemorySizes(const PrefillBackwardParams& p, int64_t query_tiles) {
    const int64_t tiles = query_tiles * p.num_qo_heads;
    counters = whole_lines(1 + tiles), rows = tiles * 2 * S::kQueries, queries = tiles * (S::kSumBytes / 4);
    keys = p.splits == 1 ? 0 : p.splits * p.kv_tokens * p.num_kv_heads * 2 * S::kDim;
  }
};

// Set p.splits and return the bytes of p.memory.
template <typename S>
int64_t plan_shape(PrefillBackwardParams& p, const Launch& where) {
  std::vector<BackwardEntry> entries = backward_entries(p);
  p.splits = splits_of<S>(p, entries, where.device);
  const MemorySizes<S> sizes(p, number_tiles<S>(entries));
  return (sizes.counters + sizes.rows + sizes.queries + sizes.keys) * static_cast<int64_t>(sizeof(float));
}

// Return a map of one head's rows of a tile. Expanded tensors have strides of 0, which the driver accepts.
// The stride of a single token or head may be any number.
template <typename S>
CUtensorMap map_of(const HeadRows& rows, int64_t tokens, int64_t heads, int box) {
  return tensor_map<128, 3>(map_type<typename S::T>(), 2,
                            {rows.data,
                             {S::kDim, static_cast<uint64_t>(tokens), static_cast<uint64_t>(heads)},
                             {1, tokens > 1 ? rows.row : S::kDim, heads > 1 ? rows.head : S::kDim},
                             {64, static_cast<uint32_t>(box), 1}});
}

template <typename S>
void launch_shape(PrefillBackwardParams p, const Launch& where) {
  std::vector<BackwardEntry> entries = backward_entries(p);
  const int64_t query_tiles = number_tiles<S>(entries);
  const MemorySizes<S> sizes(p, query_tiles);
  BackwardMemory memory{};
  memory.next_work = reinterpret_cast<uint32_t*>(p.memory), memory.added = memory.next_work + 1;
  memory.rows = p.memory + sizes.counters, memory.sums = memory.rows + sizes.rows;
  p.sums = memory.sums + sizes.queries;
  memory.query_tiles = static_cast<int32_t>(query_tiles);
  const BackwardMaps maps{
      map_of<S>(p.q, p.tokens, p.num_qo_heads, S::kQueries), map_of<S>(p.k, p.kv_tokens, p.num_kv_heads, S::kKeys),
      map_of<S>(p.v, p.kv_tokens, p.num_kv_heads, S::kKeys), map_of<S>(p.grad, p.tokens, p.num_qo_heads, S::kQueries)};
  const Launch how{where.stream, where.device, 0};
  const dim3 threads(kBackwardRowThreads);
  for (size_t next = 0; next < entries.size();) {
    BackwardTable table{};
    int64_t keys = 0, queries = 0;
    const int32_t first = entries[next].first_query_tile;
    for (; next < entries.size() && table.count < kBackwardEntries; ++next) {
      BackwardEntry& entry = table.at[table.count++] = entries[next];
      entry.first_row_tile = static_cast<int32_t>(keys);
      keys += (int64_t{entry.kv_len} + S::kKeys - 1) / S::kKeys;
      queries += (int64_t{entry.qo_len} + S::kQueries - 1) / S::kQueries;
    }
    memory.key_tiles = static_cast<int32_t>(keys);
    const auto tiles = static_cast<int32_t>(queries);
    launch(backward_rows_kernel<S>, dim3(std::max(tiles, 1), p.num_qo_heads), threads, how, p, table, memory, first,
           tiles);
    const int64_t items = std::min<int64_t>(keys * p.num_kv_heads * p.splits, device_info(where.device).num_sms);
    Kernel<backward_kernel<S>>::launch(dim3(static_cast<unsigned>(items)), dim3(S::kThreads), S::kSharedBytes, how, p,
                                       table, maps, memory);
    launch(backward_queries_kernel<S>, dim3(tiles, p.num_qo_heads), threads, how, p, table, memory, first);
  }
  if (p.splits > 1) launch_sums<typename S::T>(p, entries, where);
}

// Return true if the kernel supports the call and is faster than the portable one. The Hopper kernel has no
// windows, custom masks, biases or caps. Each request takes whole tiles, so many short requests are slow.
template <typename S>
bool serves_shape(const PrefillBackwardParams& p, const Launch& where) {
  if (p.head_dim_qk != S::kDim || p.head_dim_vo != S::kDim) return false;
  if (p.mask_mode == MaskMode::kCustom || p.window_left >= 0 || p.alibi_slopes || p.logits_soft_cap > 0) return false;
  if (p.tokens == 0 || p.kv_tokens == 0 || !serves_sm90a(where.device)) return false;
  for (const HeadRows* rows : {&p.q, &p.grad})  // maps have no negative strides
    if ((p.tokens > 1 && rows->row < 0) || (p.num_qo_heads > 1 && rows->head < 0)) return false;
  for (const HeadRows* rows : {&p.k, &p.v})
    if ((p.kv_tokens > 1 && rows->row < 0) || (p.num_kv_heads > 1 && rows->head < 0)) return false;
  std::vector<BackwardEntry> entries = backward_entries(p);
  const int64_t tiles = number_tiles<S>(entries);
  return tiles > 0 && tiles * S::kQueries <= 2 * p.tokens + S::kQueries &&
         tiles * p.num_qo_heads <= INT32_MAX / S::kQueries && p.num_qo_heads <= 65535;
}

template <typename T>
int64_t plan_backward(PrefillBackwardParams& p, const Launch& where) {
  using S64 = BackwardShape<T, 64>;
  using S128 = BackwardShape<T, 128>;
  const bool serves_64 = serves_shape<S64>(p, where);
  if (!serves_64 && !serves_shape<S128>(p, where)) return -1;
  return serves_64 ? plan_shape<S64>(p, where) : plan_shape<S128>(p, where);
}

template <typename T>
void launch_backward(const PrefillBackwardParams& p, const Launch& where) {
  p.head_dim_qk == 64 ? launch_shape<BackwardShape<T, 64>>(p, where) : launch_shape<BackwardShape<T, 128>>(p, where);
}

}  // namespace flashinfer::cuda::sm90
