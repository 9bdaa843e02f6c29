// Reduce-scatter and all-gather on CUDA; definitions and protocol in common/allreduce.h.
//
// The rows of a share are one sequence of parts. In reduce-scatter a CTA sends piece i of each peer's share
// to that peer, and adds piece i of this rank's share over the ranks. In all-gather it sends piece i of this
// rank's share to all, and stores piece i of every share.
#pragma once

#include <flashinfer/common/allreduce.h>
#include <flashinfer/cuda/comm/call.cuh>
#include <flashinfer/cuda/host/launch.cuh>

namespace flashinfer::cuda {

// kRanks: number of ranks, or 0 for any. A piece is blockDim.x parts of a share.
template <typename T, int kRanks, bool kGather, bool kAligned>
__global__ void __launch_bounds__(kCommThreads, 2) shares_kernel(const __grid_constant__ KernelParams p) {
  const int ranks = kRanks ? kRanks : p.group.ranks, rank = p.group.rank;
  const int64_t share_elements = p.rows * p.hidden;
  wait_for_inputs();
  launch_dependents();
  const uint32_t epoch = call_number(p);
  Failure failure = earlier_failure(p);
  const bool sends = failure == 0;  // words of a failed call must not meet those of a later one
  const uint32_t slot = epoch % kSlots * p.slot_parts;
  send_headers(p, ranks, epoch, sends);

  const auto part_in = [&](uint32_t piece) { return piece * blockDim.x + threadIdx.x; };
  const auto part_index = [&](uint32_t share, uint32_t part) {
    return PartIndex{share, part, share * p.row_parts + part};
  };
  const auto load_words = [&](uint32_t share, uint32_t part) {
    return as_data(raw_of(load_part<kAligned, T>(p.input, part_index(share, part), share_elements)));
  };

  const auto push = [&](uint32_t piece) {
    const uint32_t part = part_in(piece);
    if (part >= p.row_parts || !sends) return;
    const int64_t offset = int64_t{slot + part} * kPartBytes;
    if constexpr (kGather) {
      send_to_all<kRanks>(p, offset, load_words(0, part));
    } else {
#pragma unroll
      for (int distance = 1; distance < ranks; ++distance) {
        const int peer = rank + distance < ranks ? rank + distance : rank + distance - ranks;
        ptx::store_relaxed_sys(p.send[distance] + offset, load_words(peer, part));
      }
    }
  };

  const auto finish = [&](uint32_t piece) {
    const uint32_t part = part_in(piece);
    if (part >= p.row_parts) return;
    const int64_t offset = int64_t{slot + part} * kPartBytes;
    const uint4 own = load_words(kGather ? 0 : rank, part);
    if constexpr (kGather) {
      receive_all<kRanks>(p, offset, own, epoch, failure, [&](int sender, const uint4& words) {
        store_part<kAligned, T>(p.out, part_index(sender, part), share_elements, part_of<T>(words));
      });
    } else {
      store_part<kAligned, T>(p.out, part_index(0, part), share_elements,
                              sum_of_parts<T, kRanks>(p, offset, own, epoch, failure));
    }
  };

  const PieceRange range = piece_range(p, 1);
  push(range.first);
  for (uint32_t piece = range.first; piece < p.pieces; piece += range.step) {
    push(piece + range.step);  // one ahead, as in the all-reduce
    finish(piece);
    __syncthreads();  // keep the warps in step, as in the all-reduce
  }
  end_call(p, ranks, epoch, failure);
}

template <typename T, bool kGather, int kRanks, bool kAligned>
void launch_shares(const AllReduceParams& params, const Launch& where) {
  launch_flat<shares_kernel<T, kRanks, kGather, kAligned>, T>(with_addresses(params), where);
}

// Choose the kernel. For aligned shares, 2, 4 and 8 ranks have their own, and other numbers share one. Unaligned
// shares have one for any number.
template <typename T, bool kGather>
void run_shares(const AllReduceParams& p, const Launch& where, bool is_aligned) {
  if (!is_aligned) return launch_shares<T, kGather, 0, false>(p, where);
  switch (p.group.ranks) {
    case 2: return launch_shares<T, kGather, 2, true>(p, where);
    case 4: return launch_shares<T, kGather, 4, true>(p, where);
    case 8: return launch_shares<T, kGather, 8, true>(p, where);
    default: return launch_shares<T, kGather, 0, true>(p, where);
  }
}

}  // namespace flashinfer::cuda
