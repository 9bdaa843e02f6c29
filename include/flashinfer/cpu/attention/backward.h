// Gradients of attention on the CPU (FlashAttention-2, arXiv 2307.08691). For each block of keys and tile of
// queries: S = Q K^T, P = 2^(S - lse), dV += P^T dO, dS = P * (dO V^T - delta), dK += dS^T Q, dQ += dS K.
//
// A task has a range of keys of one request and one KV head. It owns the rows of dK and dV, and adds to its
// own sums of dQ. These are added at the end in the order of the ranges: no atomics, and equal bits in every
// run.
#pragma once

#include <algorithm>
#include <vector>

#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cpu/attention/backward_task.h>
#include <flashinfer/cpu/parallel.h>

namespace flashinfer::cpu {

inline std::vector<BackwardRequest> backward_requests(const PrefillBackwardParams& params) {
  std::vector<BackwardRequest> requests(params.batch_size);
  int64_t kv_start = 0, mask_start = 0;
  for (int64_t b = 0; b < params.batch_size; ++b) {
    BackwardRequest& one = requests[b];
    WorkItem& item = one.item = WorkItem{};
    item.batch = static_cast<int32_t>(b);
    item.qo_start = params.qo_indptr ? params.qo_indptr[b] : 0;
    item.qo_len = static_cast<int32_t>(params.qo_indptr ? params.qo_indptr[b + 1] - item.qo_start : params.tokens);
    item.kv_len = static_cast<int32_t>(params.kv_lens ? params.kv_lens[b] : params.kv_tokens);
    item.kv_start = static_cast<int32_t>(kv_start);
    one.mask_start = mask_start;
    const int32_t chunks = (item.kv_len + kBackwardChunk - 1) / kBackwardChunk;
    one.splits = std::min(params.splits, chunks);
    const int32_t each = one.splits ? (chunks + one.splits - 1) / one.splits : 0;
    one.split_keys = each * kBackwardChunk;
    one.splits = each ? (chunks + each - 1) / each : 0;
    kv_start += item.kv_len;
    mask_start += (int64_t{item.qo_len} * item.kv_len + 7) / 8;
  }
  return requests;
}

// Return into how many splits the keys are cut, so that many threads have work if requests and heads are
// few. Memory for the partial sums of dQ limits the number.
inline int32_t prefill_backward_splits(const PrefillBackwardParams& params) {
  constexpr int64_t kTasks = 64, kNumbers = int64_t{1} << 26;
  const int64_t pairs = std::max<int64_t>(1, params.batch_size * params.num_kv_heads);
  const int64_t size = std::max<int64_t>(1, params.tokens * params.num_qo_heads * params.head_dim_qk);
  const int64_t chunks = (params.kv_tokens + kBackwardChunk - 1) / kBackwardChunk;
  const int64_t wanted = std::min((kTasks + pairs - 1) / pairs, kNumbers / size);
  return static_cast<int32_t>(std::max<int64_t>(1, std::min(wanted, chunks)));
}

template <typename T, bool kTransforms>
void prefill_backward(const PrefillBackwardParams& params) {
  using Task = BackwardTask<T, kTransforms>;
  const std::vector<BackwardRequest> requests = backward_requests(params);
  const int64_t heads = params.num_kv_heads, pairs = params.batch_size * heads, tasks = pairs * params.splits;
  parallel_tasks(tasks, [&](const auto& next) {
    BackwardScratch scratch(params.head_dim_qk, params.head_dim_vo);
    // First splits first: with a causal mask, more queries see them.
    for (int64_t task; (task = next()) < tasks;) {
      const int32_t split = static_cast<int32_t>(task / pairs);
      const BackwardRequest& request = requests[task % pairs / heads];
      if (split >= request.splits) continue;
      const int32_t begin = split * request.split_keys, end = begin + request.split_keys;
      Task(params, request, static_cast<int32_t>(task % heads), scratch)
          .run(begin, std::min(end, request.item.kv_len), split);
    }
  });
  // Add the partial sums of dQ in the order of the splits.
  const int32_t group = params.num_qo_heads / params.num_kv_heads, dim = params.head_dim_qk;
  parallel_tasks(pairs, [&](const auto& next) {
    for (int64_t task; (task = next()) < pairs;) {
      const BackwardRequest& request = requests[task / heads];
      const int32_t head = static_cast<int32_t>(task % heads), splits = request.splits;
      for (int32_t row = 0; row < request.item.qo_len * group; ++row) {
        T* to = params.dq.at<T>(request.item.qo_start + row / group, head * group + row % group);
        for_lanes(dim, [&](int64_t d, int count) {
          vfloat sum{};
          for (int32_t split = 0; split < splits; ++split)
            sum += load(params.memory + (Task::partial_row(params, request.item, head, split) + row) * dim + d, count);
          store(to + d, sum * params.sm_scale, count);
        });
      }
    }
  });
}

template <typename T>
void prefill_backward(const PrefillBackwardParams& params) {
  if (params.alibi_slopes || params.logits_soft_cap > 0) return prefill_backward<T, true>(params);
  prefill_backward<T, false>(params);
}

}  // namespace flashinfer::cpu
