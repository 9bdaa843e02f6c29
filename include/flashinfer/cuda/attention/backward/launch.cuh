// Attention's gradients on CUDA without atomics: equal bits in every run.
//
// One kernel has a CTA per tile of keys, which loops over the queries of all heads of its group. Another has
// a CTA per tile of queries. Both compute S and dP: seven products instead of five, but no CTA waits for the
// sums of another. If the tiles of keys are too few for the GPU, several CTAs share one
// tile's queries, and a third kernel adds their partial sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cuda/attention/backward/entries.h>
#include <flashinfer/cuda/attention/backward/kernel.cuh>
#include <flashinfer/cuda/attention/backward/rows.cuh>
#include <flashinfer/cuda/attention/backward/shape.cuh>
#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/host/per_device.cuh>
#include <flashinfer/cuda/tile/convert.cuh>

namespace flashinfer::cuda {

// Return the number of splits of a tile's queries in the kernel of keys: large enough that no CTA runs long
// after the others. The CTAs of the kernel of queries start while the last CTAs run.
template <typename S>
int32_t backward_splits(const PrefillBackwardParams& p, const Launch& where) {
  constexpr int64_t kMaxBytes = int64_t{1} << 28;
  const int64_t heads = p.num_kv_heads, group = p.num_qo_heads / heads;
  const int64_t num_ctas = int64_t{device_info(where.device).num_sms} * S::kCtasPerSm;
  int64_t tiles = 0, longest = 0, all = 0;
  for (const BackwardEntry& entry : backward_entries(p)) {
    const BackwardMask mask(p, entry);
    for (int32_t row = 0; row < entry.kv_len; row += S::kRows, ++tiles) {
      if (tiles * heads >= 4 * num_ctas) return 1;
      int32_t begin, end;
      mask.columns<true>(row, std::min(row + S::kRows, entry.kv_len) - 1, begin, end);
      const int64_t steps = (end - begin + S::kColumns - 1) / S::kColumns * group;
      longest = std::max(longest, steps), all += steps * heads;
    }
  }
  const int64_t bytes = std::max<int64_t>(1, p.kv_tokens * heads * (p.head_dim_qk + p.head_dim_vo) * 4);
  int32_t splits = 1;  // the kernel of queries has three products, the kernel of keys four
  while (splits < 16 && 2 * splits * bytes <= kMaxBytes && 4 * splits <= longest &&
         longest * num_ctas * 3 > all * splits * 5)
    splits *= 2;
  return splits;
}

// Set p.splits and return the bytes of p.memory.
inline int64_t prefill_backward_plan(PrefillBackwardParams& p, const Launch& where) {
  const int32_t qk = p.head_dim_qk, vo = p.head_dim_vo;
  if (qk <= 64 && vo <= 64) {
    p.splits = backward_splits<BackwardShapes<half_t, 64, 64>::Keys>(p, where);
  } else if (qk <= 128 && vo <= 128) {
    p.splits = backward_splits<BackwardShapes<half_t, 128, 128>::Keys>(p, where);
  } else if (qk <= 192 && vo <= 128) {
    p.splits = backward_splits<BackwardShapes<half_t, 192, 128>::Keys>(p, where);
  } else {
    p.splits = backward_splits<BackwardShapes<half_t, 256, 256>::Keys>(p, where);
  }
  const int64_t sums = p.splits == 1 ? 0 : p.splits * p.kv_tokens * p.num_kv_heads * (qk + vo);
  return (floats_of_rows(p) + sums) * static_cast<int64_t>(sizeof(float));
}

// Return the number of stages that fit, at most two. Make the kernel prefer shared memory to L1 cache.
template <typename S>
int find_backward_stages(int device) {
  const int limit = device_info(device).shared_bytes;
  const int stages = kTwoStages<S> || S::shared_bytes(2) <= limit ? 2 : 1;
  if (S::shared_bytes(stages) > limit) return 0;
  Kernel<prefill_backward_kernel<S>>::prefer_shared_memory();
  return stages;
}

template <typename S>
int backward_stages(int device) {
  static PerDevice<int> found;
  const int stages = found.get(device, find_backward_stages<S>);
  if (stages == 0) throw std::runtime_error("prefill_backward: a tile does not fit into this GPU's shared memory");
  return stages;
}

// Launch one of the two kernels, once per table of requests. With PDL, each later launch may start as soon as
// all CTAs of the previous one have started.
template <typename S>
void launch_backward(const PrefillBackwardParams& p, const std::vector<BackwardEntry>& entries, const Launch& where,
                     bool& first) {
  const int stages = backward_stages<S>(where.device);
  const int64_t ctas_per_tile = S::kOfKeys ? int64_t{p.num_kv_heads} * p.splits : p.num_qo_heads;
  for (size_t next = 0; next < entries.size();) {
    BackwardTable table{};
    int64_t tiles = 0;
    for (; next < entries.size() && table.count < kBackwardEntries; ++next) {
      const int32_t rows = S::kOfKeys ? entries[next].kv_len : entries[next].qo_len;
      if (rows == 0) continue;
      table.at[table.count] = entries[next];
      table.at[table.count++].first_row_tile = static_cast<int32_t>(tiles);
      tiles += (rows + S::kRows - 1) / S::kRows;
    }
    if (tiles == 0) continue;
    if (tiles * ctas_per_tile > INT32_MAX) throw std::runtime_error("prefill_backward: more than 2147483647 blocks");
    const Launch kernel_launch{where.stream, where.device, first ? 0 : where.pdl};
    Kernel<prefill_backward_kernel<S>>::launch(dim3(static_cast<unsigned>(tiles * ctas_per_tile)), dim3(S::kThreads),
                                               S::shared_bytes(stages), kernel_launch, p, table, stages);
    first = false;
  }
}

template <typename T, int kQK, int kVO>
void prefill_backward(PrefillBackwardParams p, const Launch& where) {
  p.sums = p.memory + floats_of_rows(p);
  using Shapes = BackwardShapes<T, kQK, kVO>;
  const std::vector<BackwardEntry> entries = backward_entries(p);
  constexpr int kEach = kRowThreads / kRowLanes;
  const int64_t blocks = (p.tokens * p.num_qo_heads + kEach - 1) / kEach;
  launch(prefill_backward_rows_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kRowThreads),
         Launch{where.stream, where.device, 0}, p);
  bool first = true;
  launch_backward<typename Shapes::Keys>(p, entries, where, first);
  using Few = typename Shapes::FewQueries;
  int64_t rows = 0;
  for (const BackwardEntry& entry : entries) rows += (entry.qo_len + Few::kRows - 1) / Few::kRows * Few::kRows;
  if (rows / Few::kRows * p.num_qo_heads <= int64_t{device_info(where.device).num_sms} * Few::kCtasPerSm) {
    launch_backward<Few>(p, entries, where, first);
  } else {
    launch_backward<typename Shapes::Queries>(p, entries, where, first);
  }
  if (p.splits > 1) launch_sums<T>(p, entries, where);
}

}  // namespace flashinfer::cuda
