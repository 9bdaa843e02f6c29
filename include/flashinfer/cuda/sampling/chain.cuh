// Verification of draft tokens (Leviathan et al., 2023). The kernel accepts tokens in order up to the first
// rejection. There it draws one more token from max(target - draft, 0), or after the last draft from the
// target.
#pragma once

#include <flashinfer/cuda/sampling/rows.cuh>

namespace flashinfer::cuda {

__device__ __forceinline__ void add_count(void* to, bool wide, int64_t at, int64_t count) {
  if (wide) {
    static_cast<int64_t*>(to)[at] += count;
  } else {
    static_cast<int32_t*>(to)[at] += static_cast<int32_t>(count);
  }
}

__device__ __forceinline__ bool accepts(const ChainParams& p, int64_t request, int64_t j, const Source& draft,
                                        const Source& target) {
  const int64_t token = p.draft_token(request, j);
  if (token < 0 || token >= p.vocab_size) return false;
  const double u = static_cast<double>(p.random.draw(request, static_cast<uint32_t>(1 + j))) * 0x1p-53;
  return u * static_cast<double>(draft.at(token)) < static_cast<double>(target.at(token));
}

__device__ __forceinline__ void load_probs(Chunk& chunk, const Source& from, int c) {
  from.load(chunk, int64_t{c} * kSumChunk, 0.0f);
  chunk.for_each([](float& x) { x = max_nan(x, 0.0f); });
}

__global__ void __launch_bounds__(512) chain_kernel(const __grid_constant__ ChainParams p) {
  GlobalRow cluster_row = GlobalRow::of(p.vocab_size);
  const int64_t request = blockIdx.x / cluster_row.size, n = p.num_draft;
  cluster_row.start();
  wait_for_inputs();
  launch_dependents();
  const auto draft = [&](int64_t j) {
    return Source::of(p.draft, request * p.draft_batch_stride + j * p.draft.stride, p.vocab_size);
  };
  const auto target = [&](int64_t j) {
    return Source::of(p.target, request * p.target_batch_stride + j * p.target.stride, p.vocab_size);
  };
  // Every warp verifies all positions, 32 at a time.
  int64_t emitted = n, accepted = 0;
  for (int64_t start = 0; start < n; start += 32) {
    const int64_t j = start + lane_id();
    const bool passes = j < n && accepts(p, request, j, draft(j), target(j));
    const unsigned yes = __ballot_sync(kAllLanes, passes), no = __ballot_sync(kAllLanes, j < n && !passes);
    accepted += __popc(yes);
    if (no && emitted == n) emitted = start + __ffs(no) - 1;
  }
  const Source source = target(emitted), subtracted = draft(min(emitted, n - 1));
  const bool subtracts = emitted < n;
  set_scratch([&](Scratch& s) { s.source = source, s.subtracted = subtracted, s.subtracts = subtracts, s.remap = {}; });
  // Sums of max(target - draft, 0). The array of the maxima holds sums of the target, for the case that all
  // differences are 0.
  cluster_row.begin_pass(2 * cluster_row.chunks);
  cluster_row.for_own_chunks([&](int c) {
    Chunk chunk;
    load_probs(chunk, source, c);
    cluster_row.broadcast(cluster_row.maxima() + c, chunk_sum(chunk));
    if (subtracts) {
      Chunk other;
      load_probs(other, subtracted, c);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) chunk.at[j][i] = max_nan(chunk.at[j][i] - other.at[j][i], 0.0f);
      }
    }
    cluster_row.broadcast(cluster_row.sums() + c, chunk_sum(chunk));
  });
  cluster_row.end_pass(), ++cluster_row.pass;
  Totals totals = cluster_row.totals();
  if (!totals.valid) {
    set_scratch([](Scratch& s) { s.subtracts = false; });
    for (int c = threadIdx.x; c < cluster_row.chunks; c += blockDim.x) cluster_row.sums()[c] = cluster_row.maxima()[c];
    __syncthreads();
    totals = cluster_row.totals();
  }
  if (cluster_row.rank == 0 && cluster_row.warp() == 0) {
    const Draw<false> draw(cluster_row, totals, 0.0f);
    const int64_t token = draw(p.random.draw(request, 0));
    for (int64_t j = lane_id(); j <= n; j += 32) {
      p.tokens[request * (n + 1) + j] = static_cast<int32_t>(j < emitted    ? p.draft_token(request, j)
                                                             : j == emitted ? token
                                                                            : -1);
    }
    if (lane_id() == 0) {
      add_count(p.accepted, p.wide_accepted, request, accepted);
      add_count(p.emitted, p.wide_emitted, request, emitted);
    }
  }
  cluster_row.sync_reads();
}

}  // namespace flashinfer::cuda
