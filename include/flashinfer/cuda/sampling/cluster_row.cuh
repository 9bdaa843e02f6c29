// A row of the vocabulary, distributed over a cluster of CTAs.
//
// Each CTA owns a range of the row's chunks. Its last chunks are resident in smem, as many as fit. Each pass
// rereads the other chunks from the L2 cache. CTAs broadcast the sums and maxima of their chunks to the smem
// of every CTA. After one barrier, each CTA has the sums and maxima of the whole row, so all CTAs take the
// same decisions. If the sums and maxima of a row leave no smem for even one chunk, the row is not resident
// (kResident = false). Each pass then rereads it, without maxima.
//
// A ClusterRow is a few integers and is passed by value. A pointer to it would move it to local memory, and
// the compiler would assume that other stores can change it.
#pragma once

#include <flashinfer/cuda/ptx/cluster.cuh>
#include <flashinfer/cuda/ptx/mbarrier.cuh>
#include <flashinfer/cuda/ptx/scan.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/sampling/remap.cuh>

namespace flashinfer::cuda {

constexpr int kMaxCluster = 8, kMaxWarps = 32;
constexpr int kBins = 1024;        // counts, or 512 sums of two words each
constexpr int kCandidates = 6144;  // keys that a CTA gathers, in the memory of the bins
constexpr int kLocalBins = 512;    // sums of two words
constexpr int kSearchWords = kCandidates + 2 * kLocalBins;

// Data that the threads of a CTA share in addition to the row.
struct Scratch {
  uint64_t barriers[2];  // of the broadcasts in even and odd passes
  uint64_t warp_totals[kMaxWarps];
  uint64_t found_above, found_value;
  uint32_t found_position;
  uint32_t counter, counts[kMaxCluster];  // candidates of this CTA; candidates or another value of each CTA
  Source source, subtracted;              // the row, and the row that a draw subtracts
  bool subtracts;
  Remap remap;
};

__device__ __forceinline__ Scratch& scratch() {
  __shared__ Scratch small;
  return small;
}

__device__ __forceinline__ char* shared_bytes() {
  extern __shared__ __align__(16) char bytes[];
  return bytes;
}

// Sum of a row: the total of its chunk sums. Every warp computes it.
struct Totals {
  FixedPoint fixed;
  uint64_t total;
  bool valid;  // true if no chunk has a NaN, and the largest chunk sum is positive and finite

  __device__ double real() const { return fixed.real(total); }
};

struct NoChunk {
  __device__ __forceinline__ bool operator()(int) const { return false; }
};

template <bool kResident>
struct ClusterRow {
  int n, chunks, first, num_own, rank, size, sums_buffer, maxima_buffer;
  int capacity;  // chunks that fit into a CTA's shared memory
  int streamed;  // own chunks that are not resident
  int pass;      // number of passes with a broadcast
  // Threshold of sum_kept(), if sums() comes from it. -1: sums() has sums of all elements, or maxima.
  float sum_threshold;
  uint32_t peer_offset;  // offset from this CTA's smem to the smem of the CTA to which the lane broadcasts

  FLASHINFER_HD static int own_chunks(int chunks, int size) { return (chunks + size - 1) / size; }

  // Return the dynamic smem of a CTA with `capacity` resident chunks.
  static int64_t bytes(int64_t chunks, int64_t capacity, bool maxima) {
    return (capacity * kSumChunk + kSearchWords) * 4 + chunks * chunk_bytes(maxima);
  }
  // Bytes per chunk: two buffers of sums, and two of maxima.
  static int64_t chunk_bytes(bool maxima) { return maxima ? 16 : 8; }

  __device__ static ClusterRow of(int64_t n) {
    ClusterRow cluster_row;
    cluster_row.n = static_cast<int>(n), cluster_row.chunks = static_cast<int>(num_chunks(n));
    cluster_row.rank = ptx::cluster_rank(), cluster_row.size = ptx::cluster_size();
    const int chunks_per_cta = own_chunks(cluster_row.chunks, cluster_row.size);
    cluster_row.first = min(cluster_row.rank * chunks_per_cta, cluster_row.chunks),
    cluster_row.num_own = cluster_row.chunks_of_rank(cluster_row.rank);
    cluster_row.capacity =
        kResident ? (ptx::dynamic_shared_bytes() - kSearchWords * 4 - cluster_row.chunks * 16) / (kSumChunk * 4) : 0;
    cluster_row.streamed = cluster_row.streamed_of(cluster_row.num_own);
    cluster_row.sums_buffer = cluster_row.maxima_buffer = cluster_row.pass = 0, cluster_row.sum_threshold = -1;
    cluster_row.peer_offset =
        ptx::of_rank(shared_bytes(), min(lane_id() & 15, cluster_row.size - 1)) - ptx::shared_address(shared_bytes());
    return cluster_row;
  }
  __device__ __forceinline__ int chunks_of_rank(int of_rank) const {
    const int chunks_per_cta = own_chunks(chunks, size), from = min(of_rank * chunks_per_cta, chunks);
    return min(from + chunks_per_cta, chunks) - from;
  }
  __device__ __forceinline__ int streamed_of(int own_count) const { return max(own_count - capacity, 0); }
  __device__ __forceinline__ bool is_resident(int c) const { return kResident && c - first >= streamed; }

  // Start the cluster, before the first pass. Afterwards all CTAs are resident and have initialised their
  // barriers.
  __device__ __forceinline__ void start() const { arrive(), wait(); }
  // The two halves of start(). arrive() does not wait.
  __device__ __forceinline__ void arrive() const {
    if (!is_cluster()) return;
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : scratch().barriers) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
      ptx::mbarrier_fence_init();
    }
    ptx::cluster_arrive();
  }
  __device__ __forceinline__ void wait() const {
    if (is_cluster()) ptx::cluster_wait();
  }

  // Synchronise the cluster. sync_reads() orders earlier reads, but does not publish writes.
  __device__ __forceinline__ void sync() const { is_cluster() ? ptx::cluster_sync() : __syncthreads(); }
  __device__ __forceinline__ void sync_reads() const { is_cluster() ? ptx::cluster_sync_reads() : __syncthreads(); }

  __device__ __forceinline__ uint32_t barrier() const { return ptx::shared_address(&scratch().barriers[pass & 1]); }

  // Begin a pass in which all CTAs together broadcast `words` words to each CTA. The barrier counts their
  // bytes. Even and odd passes have separate barriers, because a CTA may be one pass ahead.
  __device__ __forceinline__ void begin_pass(int words) const {
    __syncthreads();  // no thread of this CTA still reads words of the pass before the previous one
    if (is_cluster() && threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(barrier(), words * 4);
  }
  __device__ __forceinline__ void end_pass() const {
    if (is_cluster()) return ptx::mbarrier_wait(barrier(), pass / 2 & 1);
    __syncthreads();
  }
  // Without a cluster, a store to another CTA is an illegal instruction.
  __device__ __forceinline__ bool is_cluster() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return size > 1;
#else
    return false;
#endif
  }

  __device__ __forceinline__ float* x() const { return reinterpret_cast<float*>(shared_bytes()); }
  __device__ __forceinline__ uint32_t* bins() const {
    return reinterpret_cast<uint32_t*>(shared_bytes()) + capacity * kSumChunk;
  }
  __device__ __forceinline__ uint32_t* local_bins() const { return bins() + kCandidates; }
  __device__ __forceinline__ float* sums(int which) const {
    return reinterpret_cast<float*>(local_bins() + 2 * kLocalBins) + which * chunks;
  }
  __device__ __forceinline__ float* sums() const { return sums(sums_buffer); }
  __device__ __forceinline__ float* maxima() const { return sums(2 + maxima_buffer); }

  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int warps() const { return blockDim.x / 32; }

  // Store a word to all CTAs, one CTA per lane. Lanes from 16 on store the second word of the warp.
  __device__ __forceinline__ void broadcast_bits(const uint32_t* at, uint32_t value, bool active) const {
    if (!active || (lane_id() & 15) >= size) return;
    if (is_cluster()) return ptx::store_of_rank(ptx::shared_address(at) + peer_offset, value, barrier() + peer_offset);
    *const_cast<uint32_t*>(at) = value;
  }
  __device__ __forceinline__ void broadcast(const float* at, float value) const {
    broadcast_bits(reinterpret_cast<const uint32_t*>(at), __float_as_uint(value), lane_id() < 16);
  }
  // Broadcast the words of two chunks. Lanes from 16 on hold the value of the warp's next chunk.
  __device__ __forceinline__ void broadcast_pair(const float* at, int c, bool has_other, float value) const {
    const bool second = lane_id() & 16;
    broadcast_bits(reinterpret_cast<const uint32_t*>(at) + c + (second ? warps() : 0), __float_as_uint(value),
                   !second || has_other);
  }

  template <typename F>
  __device__ __forceinline__ void for_own_chunks(const F& f) const {
    for (int c = first + warp(); c < first + num_own; c += warps()) f(c);
  }

  // Call read(chunk, c) for each chunk of a pair, then work(one, other, c, has_other). A missing second chunk
  // is 0.
  template <typename Read, typename Work>
  __device__ __forceinline__ void for_chunk_pairs(const Read& read, const Work& work) const {
    for (int c = first + warp(); c < first + num_own; c += 2 * warps()) {
      const bool has_other = c + warps() < first + num_own;
      Chunk one, other;
      read(one, c);
      if (has_other) {
        read(other, c + warps());
      } else {
        other.for_each([](float& value) { value = 0; });
      }
      work(one, other, c, has_other);
    }
  }

  // Return the number of elements from chunk c on.
  __device__ __forceinline__ int remaining(int c) const { return n - c * kSumChunk; }

  __device__ __forceinline__ void load(Chunk& chunk, int c) const {
    if (!is_resident(c)) return load_from_l2(chunk, c);
    const float* from = x() + (c - first - streamed) * kSumChunk;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 four = *reinterpret_cast<const float4*>(from + part_start(j));
      chunk.at[j][0] = four.x, chunk.at[j][1] = four.y, chunk.at[j][2] = four.z, chunk.at[j][3] = four.w;
    }
  }

  __device__ __forceinline__ static void load_from_l2(Chunk& chunk, int c) {
    const Remap& remap = scratch().remap;
    const float padding = remap.is_exponential ? -INFINITY : 0.0f;
    scratch().source.load(chunk, int64_t{c} * kSumChunk, padding, true);
    remap.apply(chunk);
  }

  __device__ __forceinline__ void read(const Source& source, Chunk& chunk, int c, float padding) const {
    source.load(chunk, int64_t{c} * kSumChunk, padding, !is_resident(c));
  }

  __device__ __forceinline__ void store(const Chunk& chunk, int c) const {
    if (!is_resident(c)) return;
    float* to = x() + (c - first - streamed) * kSumChunk;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      *reinterpret_cast<float4*>(to + part_start(j)) =
          make_float4(chunk.at[j][0], chunk.at[j][1], chunk.at[j][2], chunk.at[j][3]);
    }
  }

  // Load raw elements and store the resident chunks. Broadcast the maximum of each chunk to maxima(), or to
  // sums() if the row is not resident.
  template <bool kNaN>
  __device__ __forceinline__ void read_maxima() {
    (kResident ? maxima_buffer : sums_buffer) ^= 1, sum_threshold = -1;
    maxima_pass<kNaN>(*this);
    ++pass;
  }
  // Passes are separate functions, because each needs all registers.
  template <bool kNaN>
  __device__ __noinline__ static void maxima_pass(ClusterRow cluster_row) {
    const Source source = scratch().source;
    float* to = kResident ? cluster_row.maxima() : cluster_row.sums();
    cluster_row.begin_pass(cluster_row.chunks);
    cluster_row.for_chunk_pairs([&](Chunk& chunk, int c) { cluster_row.read(source, chunk, c, -INFINITY); },
                                [&](Chunk& one, Chunk& other, int c, bool has_other) {
                                  cluster_row.store(one, c);
                                  if (has_other) cluster_row.store(other, c + cluster_row.warps());
                                  cluster_row.broadcast_pair(to, c, has_other, pair_max<kNaN>(one, other));
                                });
    cluster_row.end_pass();
  }

  // Replace each element by f(x) and sum the chunks. With kRead, elements come from the row. Otherwise they
  // come from shared memory, or from the row through the remap (remap.cuh), which includes f already. Chunks
  // with is_zero are not read and become 0.
  template <bool kMaxima, bool kRead, typename F, typename Z>
  __device__ __forceinline__ void transform(const F& f, const Z& is_zero) {
    sums_buffer ^= 1, sum_threshold = -1;
    if constexpr (kResident && kMaxima) maxima_buffer ^= 1;
    transform_pass<kMaxima, kRead>(*this, f, is_zero);
    ++pass;
  }
  template <bool kMaxima, bool kRead, typename F, typename Z>
  __device__ __noinline__ static void transform_pass(ClusterRow cluster_row, F f, Z is_zero) {
    const Source source = scratch().source;
    cluster_row.begin_pass(kResident && kMaxima ? 2 * cluster_row.chunks : cluster_row.chunks);
    const auto change = [&](Chunk& chunk, int c) {
      if ((kRead || cluster_row.is_resident(c)) && !is_zero(c)) chunk.for_each([&](float& value) { value = f(value); });
      cluster_row.store(chunk, c);
    };
    cluster_row.for_chunk_pairs(
        [&](Chunk& chunk, int c) {
          if (is_zero(c)) {
            chunk.for_each([](float& value) { value = 0; });
          } else if (kRead) {
            cluster_row.read(source, chunk, c, 0.0f);
          } else {
            cluster_row.load(chunk, c);
          }
        },
        [&](Chunk& one, Chunk& other, int c, bool has_other) {
          change(one, c);
          if (has_other) change(other, c + cluster_row.warps());
          if constexpr (kResident && kMaxima)
            cluster_row.broadcast_pair(cluster_row.maxima(), c, has_other, pair_max<true>(one, other));
          cluster_row.broadcast_pair(cluster_row.sums(), c, has_other,
                                     pair_sum(one, other, [](float value) { return value; }));
        });
    cluster_row.end_pass();
  }

  // Sum the elements >= t into the other buffer of sums.
  __device__ __noinline__ static void sum_kept_pass(ClusterRow cluster_row, float t) {
    const float* maxima = cluster_row.maxima();
    cluster_row.begin_pass(cluster_row.chunks);
    cluster_row.for_chunk_pairs(
        [&](Chunk& chunk, int c) {
          if (!kResident || maxima[c] >= t) return cluster_row.load(chunk, c);
          chunk.for_each([](float& value) { value = 0; });
        },
        [&](const Chunk& one, const Chunk& other, int c, bool has_other) {
          cluster_row.broadcast_pair(cluster_row.sums(), c, has_other,
                                     pair_sum(one, other, [t](float value) { return value >= t ? value : 0.0f; }));
        });
    cluster_row.end_pass();
  }
  __device__ __forceinline__ void sum_kept(float t) {
    if (sum_threshold == t) return;
    sums_buffer ^= 1;
    sum_kept_pass(*this, t);
    ++pass, sum_threshold = t;
  }

  // Return the bits of the largest number, for numbers >= 0. A NaN has larger bits than any number.
  __device__ __forceinline__ static uint32_t largest_bits(const float* values, int n) {
    uint32_t max_bits = 0;
    for (int i = lane_id(); i < n; i += 32) max_bits = max(max_bits, __float_as_uint(values[i]));
    return __reduce_max_sync(kAllLanes, max_bits);
  }

  __device__ __noinline__ static uint64_t fixed_total(ClusterRow cluster_row, double up) {
    const FixedPoint fixed{up, 1.0};
    const float* sums = cluster_row.sums();
    uint64_t total = 0;
    for (int i = lane_id(); i < cluster_row.chunks; i += 32) total += fixed(sums[i]);
    return lanes_sum<32>(total);
  }

  __device__ __forceinline__ Totals totals(FixedPoint fixed) const {
    const uint32_t max_bits = largest_bits(sums(), chunks);
    const bool valid = max_bits != 0 && max_bits <= 0x7f7fffffu;
    return {fixed, valid ? fixed_total(*this, fixed.up) : 0, valid};
  }
  __device__ __forceinline__ Totals totals() const {
    const uint32_t max_bits = largest_bits(sums(), chunks);
    const FixedPoint fixed = FixedPoint::of(__uint_as_float(max_bits));
    const bool valid = max_bits != 0 && max_bits <= 0x7f7fffffu;
    return {fixed, valid ? fixed_total(*this, fixed.up) : 0, valid};
  }

  // Return the largest x >= 0. Rows that are not resident have no maxima: this pass overwrites their sums.
  __device__ __forceinline__ float largest() {
    if constexpr (kResident) return __uint_as_float(largest_bits(maxima(), chunks));
    sums_buffer ^= 1, sum_threshold = -1;
    begin_pass(chunks);
    for_own_chunks([&](int c) {
      Chunk chunk;
      load(chunk, c);
      broadcast(sums() + c, chunk_max<true>(chunk));
    });
    end_pass(), ++pass;
    return __uint_as_float(largest_bits(sums(), chunks));
  }
};

using ResidentRow = ClusterRow<true>;  // as many chunks as fit stay in shared memory
using GlobalRow = ClusterRow<false>;   // every pass reads chunks from global memory

// Return the largest number of any sign, or NaN if there is a NaN.
__device__ __forceinline__ float largest_of(const float* values, int n) {
  float maximum = -INFINITY;
  for (int i = lane_id(); i < n; i += 32) maximum = max_nan(maximum, values[i]);
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) maximum = max_nan(maximum, __shfl_xor_sync(kAllLanes, maximum, apart));
  return maximum;
}

// Call f(scratch) in one thread, between two barriers. f sets the row and the remap of its chunks.
template <typename F>
__device__ __forceinline__ void set_scratch(const F& f) {
  __syncthreads();
  if (threadIdx.x == 0) f(scratch());
  __syncthreads();
}

}  // namespace flashinfer::cuda
