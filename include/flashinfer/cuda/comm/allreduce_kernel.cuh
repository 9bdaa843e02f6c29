// All-reduce on CUDA in one or two shots, with residual and RMSNorm on request; equations and protocol in
// common/allreduce.h.
//
// Each rank sends its rows to all peers and adds the parts in the order of ranks. In two shots a warp's 32
// parts have one owner, and owners change from warp to warp, so each CTA adds about 1 / ranks of its parts.
// call.cuh says why ranks may have different grids. With the norm, a cluster has a row, with one part per
// thread, or 2 sizeof(T) parts on GPUs without clusters. The order in which squares are added depends on the
// row's size only, so a row has the same bits in every batch.
//
// The least time of a call is 2.2 us (2.6 us with the norm) plus its bytes at 360 GB/s, the rate of NVLink.
// On two H100, calls took at most 1.03 times that from 8 MiB on (with the norm from 64 MiB on), and 1.1 us
// more for 64 KiB.
#pragma once

#include <flashinfer/common/allreduce.h>
#include <flashinfer/cuda/comm/call.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/norm.cuh>
#include <flashinfer/cuda/ptx/cluster.cuh>
#include <flashinfer/cuda/ptx/policy.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/quantize.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kMaxCommCluster = 8;

// Partial results of all warps of a cluster. A word has the number of its reduction in the upper half and a
// float in the lower one. Two sets of words suffice. A warp stores to the set of reduction k again in
// reduction k + 2. By then it has the words of reduction k + 1 of all warps, and each warp sent these after
// it had read the words of reduction k. Stores and loads of words are relaxed accesses of cluster scope.
// racecheck of compute-sanitizer reports them, as it does all polling.
struct ClusterWords {
  uint64_t at[2][kMaxCommCluster * kCommThreads / 32];
};

// kSum: return the sum over all threads of the cluster, in a fixed order. Otherwise return the maximum of
// values >= 0. Each warp stores its result in all CTAs, and polls the words of its own CTA. A barrier of the
// cluster would first wait for the CTA's stores of rows to global memory, and then need a remote load.
// `number` counts the reductions from 0.
template <bool kSum>
__device__ __forceinline__ float cluster_reduce(float value, ClusterWords& words, uint32_t& number) {
  const auto over_lanes = [](float x) { return kSum ? lanes_sum<32>(x) : lanes_max<32>(x); };
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32, ctas = ptx::cluster_size();
  uint64_t* row = words.at[number % 2];
  ++number;
  value = over_lanes(value);
  if (lane < ctas)
    ptx::store_word_of_rank(ptx::of_rank(row + ptx::cluster_rank() * warps + threadIdx.x / 32, lane),
                            uint64_t{number} << 32 | __float_as_uint(value));
  value = 0;
  for (int i = lane; i < warps * ctas; i += 32) {
    uint64_t word;
    do word = ptx::load_word(row + i);
    while (word >> 32 != number);
    const float other = __uint_as_float(static_cast<uint32_t>(word));
    value = kSum ? value + other : fmaxf(value, other);
  }
  __syncwarp();
  return over_lanes(value);
}

// Store a part of quant_out.
template <bool kAligned, int kN>
__device__ __forceinline__ void store_quantized(void* to, const PartIndex& at, int64_t row_elements,
                                                const float (&values)[kN]) {
  store_part<kAligned>(to, at, row_elements, quantize(values, DType::kFloat8E4M3));
}

// Return the scale of the group of a part, and store its exponent. Adjacent lanes have the parts of a group,
// and all lanes of a warp call this. The last group also stores zeros to the unused bytes of its word.
template <int kN>
__device__ __forceinline__ float group_scale(const AllReduceParams& p, const PartIndex& at, bool is_inside,
                                             float maximum) {
  const int lanes = p.columns / kN;
  for (int by = lanes / 2; by > 0; by /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, by));
  const uint32_t exponent = group_exponent(maximum);
  if (is_inside && at.in_row % lanes == 0) {
    const int64_t group = at.in_row / lanes, groups = p.hidden / p.columns;
    *exponent_of(p.scale_out, p, at.row, group) = static_cast<uint8_t>(exponent);
    for (int64_t rest = group + 1; group + 1 == groups && rest % 4 != 0; ++rest)
      *exponent_of(p.scale_out, p, at.row, rest) = 0;
  }
  return __uint_as_float(exponent << 23);
}

// kRanks: number of ranks, or 0 for any. kVecs: parts of a thread in a piece. A piece is a row if kNorm,
// otherwise blockDim.x parts of all rows, concatenated.
template <typename T, int kRanks, int kVecs, bool kNorm, bool kAligned, bool kTwoShots>
__global__ void __launch_bounds__(kCommThreads, kVecs == 1 ? 2 : 1)
    allreduce_kernel(const __grid_constant__ KernelParams p) {
  constexpr int kN = kPartElements<T>;
  // Before the wait for a piece, load all its inputs and send the next piece. With kRanks == 0, registers do
  // not suffice.
  constexpr bool kAhead = kVecs == 1 && kRanks != 0;
  __shared__ ClusterWords words;
  const int ranks = kRanks ? kRanks : p.group.ranks, rank = p.group.rank;
  const uint32_t cluster = kNorm ? ptx::cluster_size() : 1;
  const int64_t row_elements = kNorm ? p.hidden : p.rows * p.hidden;

  const auto part_index = [&](uint32_t piece, int i) {
    const uint32_t row = kNorm ? piece : 0;
    const uint32_t in_row = (kNorm ? i * cluster + ptx::cluster_rank() : piece) * blockDim.x + threadIdx.x;
    return PartIndex{row, in_row, row * p.row_parts + in_row};
  };
  const auto is_inside = [&](const PartIndex& at) { return at.in_row < p.row_parts && (!kNorm || at.row < p.pieces); };
  if constexpr (kNorm) {
    for (int k = threadIdx.x; k < 2 * kMaxCommCluster * kCommThreads / 32; k += blockDim.x) words.at[0][k] = 0;
    __syncwarp();
    ptx::cluster_arrive();
    const PartIndex at = part_index(0, 0);
    if (at.in_row < p.row_parts) ptx::prefetch_l2(static_cast<const T*>(p.weight) + at.in_row * kN);
  }
  wait_for_inputs();
  launch_dependents();

  const auto load = [&](uint32_t piece, uint4(&to)[kVecs]) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const PartIndex at = part_index(piece, i);
      if (is_inside(at)) to[i] = raw_of(load_part<kAligned, T>(p.input, at, row_elements));
    }
  };
  const PieceRange range = piece_range(p, cluster);
  const uint32_t step = range.step;
  uint32_t piece = range.first, number = 0;
  uint4 own[kVecs], next[kVecs], later[kVecs];  // of this piece and of the two after it
  load(piece, own);                             // overlaps the loads of the epoch and of earlier failures
  if constexpr (kAhead) load(piece + step, next);
  const uint32_t epoch = call_number(p);
  Failure failure = earlier_failure(p);
  const bool sends = failure == 0;  // words of a failed call must not meet those of a later one
  const uint32_t slot = epoch % kSlots * p.slot_parts;
  send_headers(p, ranks, epoch, sends);

  // owner_of: rank that adds a part, the same in all lanes of a warp. distance_to: its distance, 0 for this
  // rank.
  const auto owner_of = [&](const PartIndex& at) { return (at.in_row / 32 + at.row) % ranks; };
  const auto distance_to = [&](int owner) { return owner < rank ? owner + ranks - rank : owner - rank; };

  const auto send = [&](uint32_t piece, uint4(&own)[kVecs]) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const PartIndex at = part_index(piece, i);
      if (!is_inside(at)) continue;
      own[i] = as_data(own[i]);
      const int64_t offset = int64_t{slot + at.index} * kPartBytes;
      if (!sends) continue;
      if constexpr (kTwoShots) {
        const int distance = distance_to(owner_of(at));
        if (distance != 0) ptx::store_relaxed_sys(p.send[distance] + offset, own[i]);
      } else {
        send_to_all<kRanks>(p, offset, own[i]);
      }
    }
  };

  const auto sum_over_ranks = [&](const PartIndex& at, const uint4& own) {
    return sum_of_parts<T, kRanks>(p, int64_t{slot + at.index} * kPartBytes, own, epoch, failure);
  };

  // Return the rounded sum of a part. One shot: add the parts of all ranks. Two shots: the owner adds them
  // and sends the sum to all, the others receive it.
  const auto sum_of = [&](const PartIndex& at, const uint4& own) {
    if constexpr (!kTwoShots) return sum_over_ranks(at, own);
    const int64_t offset = int64_t{slot + at.index} * kPartBytes;
    const int owner = owner_of(at);
    uint4 words;
    if (owner == rank) {
      words = as_data(raw_of(sum_over_ranks(at, own)));
      if (sends && failure == 0)
        send_to_all<kRanks>(p, offset, words);  // after a failure, peers would take the NaN for data
    } else {
      uint8_t* from = p.receive[owner] + offset;
      words = receive(p, ptx::load4_relaxed_sys(from), from, owner, epoch, failure);
    }
    return part_of<T>(words);
  };

  send(piece, own);
  if constexpr (kNorm) {
    __syncwarp();
    ptx::cluster_wait();  // all CTAs have started and cleared their ClusterWords
  }
  for (; piece < p.pieces; piece += step) {
    Part<T> residual[kVecs], weight[kVecs];
    const auto load_weight = [&](int i) {
      const PartIndex at = part_index(0, i);
      if (at.in_row < p.row_parts) weight[i] = load_part<kAligned, T>(p.weight, at, row_elements);
    };
    const auto load_residual = [&](int i) {
      const PartIndex at = part_index(piece, i);
      if (at.in_row < p.row_parts) residual[i] = load_part<kAligned, T>(p.residual_in, at, row_elements);
    };
    if constexpr (kAhead) {
      // The loads precede the stores of send(). The weight is loaded for each row: it stays in no register.
      load(piece + 2 * step, later);
      if constexpr (kNorm) load_residual(0), load_weight(0);
      send(piece + step, next);  // one ahead: two or four were slower (two H100)
    }
    float values[kVecs][kN];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const PartIndex at = part_index(piece, i);
      if (at.in_row >= p.row_parts) continue;
      if constexpr (kNorm && !kAhead) load_residual(i);
      const Part<T> sum = sum_of(at, own[i]);
      if (!kNorm || p.out) store_part<kAligned, T>(p.out, at, row_elements, sum);
      if constexpr (kNorm) {
        float other[kN];
        sum.to_floats(values[i]);
        residual[i].to_floats(other);
#pragma unroll
        for (int j = 0; j < kN; ++j) values[i][j] += other[j], squares += values[i][j] * values[i][j];
        store_part<kAligned, T>(p.residual_out, at, row_elements, Part<T>::from_floats(values[i]));
      }
    }
    if constexpr (kNorm) {
      const ScaleOf<T> scale =
          inverse_root<T>(cluster_reduce<true>(squares, words, number), p.hidden, Scalar{p.eps, nullptr});
      float maximum[kVecs] = {};
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const PartIndex at = part_index(piece, i);
        if (at.in_row >= p.row_parts) continue;
        if constexpr (!kAhead) load_weight(i);
        float factor[kN];
        weight[i].to_floats(factor);
#pragma unroll
        for (int j = 0; j < kN; ++j) values[i][j] = values[i][j] * scale * (factor[j] + ScaleOf<T>(p.weight_bias));
        if (p.norm_out) store_part<kAligned, T>(p.norm_out, at, row_elements, Part<T>::from_floats(values[i]));
        if (p.quant == NormQuant::kNone) continue;
        round_all<T>(values[i]);
#pragma unroll
        for (int j = 0; j < kN; ++j) maximum[i] = fmaxf(maximum[i], fabsf(values[i][j]));
      }
      if (p.quant != NormQuant::kNone) {
        float divisor = 1, factor = 1;
        if (p.quant == NormQuant::kStatic) factor = 1.0f / p.scale.get_float();
        if (p.quant == NormQuant::kToken) {
          float largest = maximum[0];
#pragma unroll
          for (int i = 1; i < kVecs; ++i) largest = fmaxf(largest, maximum[i]);
          divisor = token_scale(cluster_reduce<false>(largest, words, number));
          if (threadIdx.x == 0 && ptx::cluster_rank() == 0) static_cast<float*>(p.scale_out)[piece] = divisor;
        }
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          const PartIndex at = part_index(piece, i);
          const bool is_inside = at.in_row < p.row_parts;
          if (p.quant == NormQuant::kGroup) divisor = group_scale<kN>(p, at, is_inside, maximum[i]);
          if (!is_inside) continue;
#pragma unroll
          for (int j = 0; j < kN; ++j) values[i][j] = values[i][j] * factor / divisor;
          store_quantized<kAligned>(p.quant_out, at, row_elements, values[i]);
        }
      }
    }
    // Without the norm, a barrier keeps the warps of a CTA in step, so they send adjacent parts together:
    // 8192 x 8192 took 370 us instead of 430 us (two H100). With the norm, the reductions do.
    if constexpr (!kNorm) __syncthreads();
    if constexpr (kAhead) {
      own[0] = next[0], next[0] = later[0];
    } else {
      load(piece + step, own), send(piece + step, own);
    }
  }

  // No barrier of the cluster: each warp has received all words of its CTA, so no CTA writes to its smem any more.
  end_call(p, ranks, epoch, failure);
}

template <typename T, int kRanks, bool kAligned, bool kTwoShots>
void launch_allreduce(const AllReduceParams& params, const Launch& where) {
  constexpr int kN = kPartElements<T>, kVecs = 2 * sizeof(T);
  KernelParams p = with_addresses(params);
  if (p.weight == nullptr) {
    return launch_flat<allreduce_kernel<T, kRanks, 1, false, kAligned, kTwoShots>, T>(p, where);
  }
  const int parts = p.hidden < 1 ? 1 : static_cast<int>((p.hidden + kN - 1) / kN);  // of a row; 1 if it is empty
  const bool has_clusters = device_info(where.device).major >= 9;
  const int most = (has_clusters ? kMaxCommCluster : kVecs) * kCommThreads;
  if (parts > most)
    throw_value_error("allreduce_fusion: input: got " + std::to_string(p.hidden) + " columns, wanted at most " +
                      std::to_string(most * kN) + " on this GPU");
  p.row_parts = p.hidden < 1 ? 0 : parts, p.pieces = static_cast<uint32_t>(p.rows);
  if (has_clusters) {
    const PieceShape shape = piece_shape(params, p.rows * parts, where);
    int cluster = 1;
    while (cluster < kMaxCommCluster && parts > cluster * shape.cta_threads) cluster *= 2;
    const int threads = ((parts + cluster - 1) / cluster + 31) / 32 * 32;
    return launch_resident<allreduce_kernel<T, kRanks, 1, true, kAligned, kTwoShots>>(p, shape, threads, cluster,
                                                                                      where);
  }
  const int threads = ((parts + kVecs - 1) / kVecs + 31) / 32 * 32;
  launch_resident<allreduce_kernel<T, 0, kVecs, true, false, kTwoShots>>(p, kSumPieces, threads, 1, where);
}

}  // namespace flashinfer::cuda
