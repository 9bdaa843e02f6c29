// Code that the collective kernels share: load and store parts (16 bytes of a row), send and compare headers,
// exchange words, launch. common/allreduce.h describes the protocol.
//
// Ranks may have different grids: all CTAs are resident, and a CTA waits for no CTA of its own rank outside
// its cluster.
#pragma once

#include <atomic>

#include <flashinfer/common/allreduce.h>
#include <flashinfer/common/dispatch.h>
#include <flashinfer/cuda/comm/words.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kCommThreads = 512;  // of a CTA at most
constexpr int kLoadsInFlight = 4;  // parts that a thread loads before it tests the first

template <typename T>
constexpr int kPartElements = kPartBytes / sizeof(T);
template <typename T>
using Part = Vec<T, kPartElements<T>>;

// Parameters of the kernel, and the addresses of slot 0, so threads need not compute them.
struct KernelParams : AllReduceParams {
  uint8_t* send[kMaxRanks];     // by distance d: where this rank writes in the inbox of rank (rank + d) % ranks
  uint8_t* receive[kMaxRanks];  // by rank: where it writes in this rank's inbox
  uint32_t slot_parts;          // from slot 0 to slot 1
  uint32_t row_parts;           // with the norm: parts of one row; without it: of all rows, concatenated
  uint32_t pieces;
};

// Index of a part: its row or share, its index there, and its index in the tensor. The all-reduce uses the
// last one also in the inbox.
struct PartIndex {
  uint32_t row, in_row, index;
};

// Load a part. Elements after the row's end are 0. If not kAligned, rows begin at any element.
template <bool kAligned, typename T>
__device__ __forceinline__ Part<T> load_part(const void* from, const PartIndex& at, int64_t row_elements) {
  constexpr int kN = kPartElements<T>;
  if constexpr (kAligned) return load_vec<T, kN>(static_cast<const T*>(from) + int64_t{at.index} * kN);
  const T* row = static_cast<const T*>(from) + at.row * row_elements;
  Part<T> part;
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const int64_t column = int64_t{at.in_row} * kN + j;
    part.at[j] = column < row_elements ? row[column] : from_float<T>(0.0f);
  }
  return part;
}

template <bool kAligned, typename T, int kN>
__device__ __forceinline__ void store_part(void* to, const PartIndex& at, int64_t row_elements,
                                           const Vec<T, kN>& part) {
  if constexpr (kAligned) return store_vec(static_cast<T*>(to) + int64_t{at.index} * kN, part);
  T* row = static_cast<T*>(to) + at.row * row_elements;
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const int64_t column = int64_t{at.in_row} * kN + j;
    if (column < row_elements) row[column] = part.at[j];
  }
}

template <typename T>
__device__ __forceinline__ Part<T> part_of(const uint4& words) {
  Part<T> part;
  memcpy(&part, &words, sizeof(part));
  return part;
}

// Pieces of a cluster: first, first + step, and so on. The last cluster of a grid has none, because its last
// CTA exchanges the headers. With pieces in that CTA, the fence of the headers delayed their words: a sum of
// 1 x 4096 took 4.3 us instead of 3.5 us (two H100). In a grid of one cluster, that cluster has pieces and
// headers.
struct PieceRange {
  uint32_t first, step;
};
__device__ __forceinline__ PieceRange piece_range(const KernelParams& p, uint32_t cluster) {
  const uint32_t index = blockIdx.x / cluster, count = gridDim.x / cluster;
  if (count == 1) return {0, 1};
  return {index == count - 1 ? p.pieces : index, count - 1};
}
__device__ __forceinline__ bool handles_header(const KernelParams& p, int ranks) {
  return blockIdx.x == gridDim.x - 1 && threadIdx.x < ranks && threadIdx.x != p.group.rank;
}

// Clear the header of the next call and send the header of this call. All threads call it.
__device__ __forceinline__ void send_headers(const KernelParams& p, int ranks, uint32_t epoch, bool sends) {
  const int rank = p.group.rank;
  if (handles_header(p, ranks) && sends) {
    ptx::store_relaxed_sys(header_of(p.group, rank, threadIdx.x, epoch + 1), empty_words());
    ptx::fence_sys();  // only in these threads: fences in all threads took 2.7 us (two H100)
    ptx::store_relaxed_sys(header_of(p.group, threadIdx.x, rank, epoch), words_of(header_of(p, epoch)));
  }
}

// Send words to all peers, from the next rank on, so that senders share the links. kRanks = 0: the number of
// ranks is known only at run time.
template <int kRanks>
__device__ __forceinline__ void send_to_all(const KernelParams& p, int64_t offset, const uint4& words) {
  const int ranks = kRanks ? kRanks : p.group.ranks;
#pragma unroll
  for (int distance = 1; distance < ranks; ++distance) ptx::store_relaxed_sys(p.send[distance] + offset, words);
}

// Wait for the words of all ranks, in the order of ranks, and call use(rank, words). `own` has the words of
// this rank.
template <int kRanks, typename Use>
__device__ __forceinline__ void receive_all(const KernelParams& p, int64_t offset, const uint4& own, uint32_t epoch,
                                            Failure& failure, const Use& use) {
  const int ranks = kRanks ? kRanks : p.group.ranks, rank = p.group.rank;
  constexpr int kBatch = kRanks == 0 ? 1 : kRanks < kLoadsInFlight ? kRanks : kLoadsInFlight;
#pragma unroll
  for (int first = 0; first < ranks; first += kBatch) {
    uint4 words[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      words[k] = first + k == rank ? own : ptx::load4_relaxed_sys(p.receive[first + k] + offset);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int sender = first + k;
      if (sender != rank) words[k] = receive(p, words[k], p.receive[sender] + offset, sender, epoch, failure);
      use(sender, words[k]);
    }
  }
}

// Return the rounded sum of a part over the ranks.
template <typename T, int kRanks>
__device__ __forceinline__ Part<T> sum_of_parts(const KernelParams& p, int64_t offset, const uint4& own, uint32_t epoch,
                                                Failure& failure) {
  constexpr int kN = kPartElements<T>;
  float sum[kN];
  receive_all<kRanks>(p, offset, own, epoch, failure, [&](int sender, const uint4& words) {
    float values[kN];
    part_of<T>(words).to_floats(values);
#pragma unroll
    for (int j = 0; j < kN; ++j) sum[j] = sender == 0 ? values[j] : sum[j] + values[j];
  });
  return Part<T>::from_floats(sum);
}

// Compare the calls of all ranks, report an error and count the call. All threads of a CTA call it.
// kHeadersOnly: the call waits only for headers, never for words.
template <bool kHeadersOnly = false>
__device__ __forceinline__ void end_call(const KernelParams& p, int ranks, uint32_t epoch, Failure failure) {
  const int rank = p.group.rank;
  // Each call advances the epoch words of all CTAs, so calls may have different grids. Thread 0 reads its
  // CTA's word again. Another value than `epoch` means that a concurrent call of this rank has ended
  // meanwhile. Without kHeadersOnly, CTAs with pieces have waited for words, so the load comes first and
  // overlaps the loads of headers. With kHeadersOnly, it follows the waits of all threads for headers.
  volatile uint32_t* epochs = p.group.state->epoch;
  uint32_t epoch_now = epoch;
  if (!kHeadersOnly && threadIdx.x == 0) epoch_now = epochs[blockIdx.x];
  if (handles_header(p, ranks)) compare_headers(p, threadIdx.x, epoch, failure);
  if (kHeadersOnly) {
    __syncthreads();
    if (threadIdx.x == 0) epoch_now = epochs[blockIdx.x];
  }
  if (epoch_now != epoch && failure == 0) failure = fail(p, CommError::kConcurrent, rank);
  report_failure(p, failure, epoch);
  __syncthreads();
  for (int k = blockIdx.x + threadIdx.x * gridDim.x; k < kEpochWords; k += blockDim.x * gridDim.x)
    epochs[k] = epoch + 1;
  __syncwarp();
}

// Return the number of clusters of a kernel that are resident at one time. The device must be current.
template <auto kFunction>
int resident_clusters(int device, int threads, int cluster) {
  static DeviceTable<std::atomic<int>[4 * (kCommThreads / 32)]> found;
  int log2 = 0;
  while (1 << log2 < cluster) ++log2;
  std::atomic<int>& known = found.at(device)[log2 * (kCommThreads / 32) + threads / 32 - 1];
  int count = known.load(std::memory_order_relaxed);
  if (count > 0) return count;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(cluster), config.blockDim = dim3(threads);
  config.attrs = &attribute, config.numAttrs = 1;
  if (cluster > 1) {
    check(cudaOccupancyMaxActiveClusters(&count, kFunction, &config), "cudaOccupancyMaxActiveClusters");
  } else {
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kFunction, threads, 0),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    count *= device_info(device).num_sms;
  }
  if (count < 1) throw std::runtime_error("allreduce: this device holds no CTA of the kernel");
  known.store(count, std::memory_order_relaxed);
  return count;
}

template <auto kFunction>
void launch_resident(const KernelParams& p, const PieceShape& shape, int threads, int cluster, const Launch& where) {
  int64_t count = p.group.num_sms * (shape.sm_threads / threads) / cluster;
  const int resident = resident_clusters<kFunction>(where.device, threads, cluster);
  if (count > resident) count = resident;
  if (count > kEpochWords / cluster) count = kEpochWords / cluster;
  if (count > int64_t{p.pieces} + 1) count = int64_t{p.pieces} + 1;  // and one for the headers
  if (count < 1) count = 1;
  launch_with(kFunction, dim3(count * cluster), dim3(threads), 0, cluster, where, p);
}

inline KernelParams with_addresses(const AllReduceParams& p) {
  const CommGroup& group = p.group;
  KernelParams result{};
  static_cast<AllReduceParams&>(result) = p;
  for (int i = 0; i < group.ranks; ++i) {
    if (i > 0) result.send[i] = area_of(group, (group.rank + i) % group.ranks, group.rank, 0);
    if (i != group.rank) result.receive[i] = area_of(group, group.rank, i, 0);
  }
  result.slot_parts = static_cast<uint32_t>((group.ranks - 1) * (group.slot_bytes / kPartBytes));
  return result;
}

inline PieceShape piece_shape(const AllReduceParams& p, int64_t parts, const Launch& where) {
  const int num_sms = p.group.num_sms;
  return flashinfer::piece_shape(parts, num_sms, p.weight != nullptr, num_sms < device_info(where.device).num_sms);
}

// Divide all rows, concatenated, into pieces of a CTA, and launch the kernel.
template <auto kFunction, typename T>
void launch_flat(KernelParams p, const Launch& where) {
  p.row_parts = static_cast<uint32_t>((p.rows * p.hidden + kPartElements<T> - 1) / kPartElements<T>);
  const PieceShape shape = piece_shape(p, p.row_parts, where);
  p.pieces = (p.row_parts + shape.cta_threads - 1) / shape.cta_threads;
  launch_resident<kFunction>(p, shape, shape.cta_threads, 1, where);
}

}  // namespace flashinfer::cuda
