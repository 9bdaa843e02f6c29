// The portable kernel of attention's gradients (FlashAttention-2, arXiv 2307.08691). A CTA owns a tile of
// rows, keys or queries, and loops over the columns, queries or keys:
//   P = 2^(Q K^T - lse),   dS = P * (dO V^T - delta)
//   rows are keys:     dV += P^T dO,   dK += dS^T Q
//   rows are queries:  dQ += dS K
#pragma once

#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cuda/attention/backward/copy.cuh>
#include <flashinfer/cuda/attention/backward/rows.cuh>
#include <flashinfer/cuda/attention/backward/shape.cuh>
#include <flashinfer/cuda/attention/backward/tile.cuh>
#include <flashinfer/cuda/attention/backward/write.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>

namespace flashinfer::cuda {

// True if two stages fit on every GPU that the kernels support. The code for one stage is then left out.
template <typename S>
constexpr bool kTwoStages = S::shared_bytes(2) <= (163 << 10);

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kCtasPerSm)
    prefill_backward_kernel(const __grid_constant__ PrefillBackwardParams p,
                            const __grid_constant__ BackwardTable table, const int max_stages) {
  const int stages = kTwoStages<S> ? 2 : max_stages;
  extern __shared__ __align__(128) uint8_t memory[];
  using T = typename S::T;
  launch_dependents();
  const int32_t heads = S::kOfKeys ? p.num_kv_heads : p.num_qo_heads, group = p.num_qo_heads / p.num_kv_heads;
  const int32_t head = static_cast<int32_t>(blockIdx.x) % heads, rest = static_cast<int32_t>(blockIdx.x) / heads;
  const int32_t parts = S::kOfKeys ? p.splits : 1, part = rest % parts;
  int32_t tile = rest / parts;
  const BackwardEntry& entry = table.find(tile);
  const BackwardMask mask(p, entry);
  // With a causal mask, the first keys and the last queries have the most work. They come first.
  const int32_t count = S::kOfKeys ? entry.kv_len : entry.qo_len;
  const int32_t row_start = (S::kOfKeys ? tile : (count + S::kRows - 1) / S::kRows - 1 - tile) * S::kRows;

  BackwardColumns<S> columns{p, entry, S::kOfKeys ? head * group : head / group, 0, 0, 0};
  mask.template columns<S::kOfKeys>(row_start, min(row_start + S::kRows, count) - 1, columns.begin, columns.end);
  columns.begin = columns.begin / S::kColumns * S::kColumns;
  const int32_t stages_of_head = (columns.end - columns.begin + S::kColumns - 1) / S::kColumns;  // stages
  const int64_t all_stages = int64_t{stages_of_head} * (S::kOfKeys ? group : 1);
  int32_t stages_left = static_cast<int32_t>(all_stages * (part + 1) / parts - all_stages * part / parts);
  columns.next = columns.begin;
  if (S::kOfKeys && stages_left > 0) {
    const int32_t skipped = static_cast<int32_t>(all_stages * part / parts);
    columns.head += skipped / stages_of_head, columns.next += skipped % stages_of_head * S::kColumns;
  }

  const uint32_t shared = ptx::shared_address(memory), ring = shared + S::kRowsBytes;
  BackwardWarp<S> warp(p, mask, shared, stages, row_start);
  if (stages_left > 0) {
    const int64_t first = int64_t{S::kOfKeys ? entry.kv_start : entry.qo_start} + row_start;
    load_rows<T, S::kQKRow, S::kRows, S::kThreads>(shared, S::kOfKeys ? p.k : p.q, first, head, count - row_start,
                                                   p.head_dim_qk);
    load_rows<T, S::kVORow, S::kRows, S::kThreads>(shared + S::kRows * S::kQKRow, S::kOfKeys ? p.v : p.grad, first,
                                                   head, count - row_start, p.head_dim_vo);
    if constexpr (!S::kOfKeys) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t row = row_start + 32 * warp.group + static_cast<int32_t>(threadIdx.x) % 32 / 4 + 8 * i;
        const int64_t at = (int64_t{entry.qo_start} + row) * p.num_qo_heads + head;
        warp.rows[i] = row < count ? rows_in_memory(p)[at] : BackwardRow{math::inf, 0};
      }
      if (p.alibi_slopes) warp.slope = p.alibi_slopes[head];
    }
    columns.load(ring);
    ptx::cp_async_commit();
  }
  const auto rows_of = [&](int stage) {
    return reinterpret_cast<const BackwardRow*>(memory + S::kRowsBytes + stage * S::kStageBytes + S::kTilesBytes);
  };
  const bool bias_or_cap = p.alibi_slopes != nullptr || p.logits_soft_cap > 0;
  for (int stage = 0; stages_left > 0; --stages_left) {
    const int32_t column = columns.next;
    if (S::kOfKeys && p.alibi_slopes) warp.slope = p.alibi_slopes[columns.head];
    ptx::cp_async_wait<0>();
    __syncthreads();
    const int next = stages == 2 ? 1 - stage : 0;
    columns.advance();
    if (stages == 2 && stages_left > 1) columns.load(ring + next * S::kStageBytes), ptx::cp_async_commit();
    warp.columns(ring + stage * S::kStageBytes, rows_of(stage), column, bias_or_cap);
    if (stages == 1 && stages_left > 1) {
      __syncthreads();
      columns.load(ring), ptx::cp_async_commit();
    }
    stage = next;
  }
  wait_for_inputs();  // this kernel must not end before the previous one, whose results it does not read
  write_gradients<S>(p, entry, warp, row_start + 32 * warp.group, head, part);
}

}  // namespace flashinfer::cuda
