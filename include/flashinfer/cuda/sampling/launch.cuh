// Launch shapes of the family: how many CTAs share a row, with how many threads and how much shared memory.
#pragma once

#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/sampling/stream.cuh>

namespace flashinfer::cuda {

// Shape of a launch: a cluster of `size` CTAs per row.
struct Shape {
  int size, threads;
  int64_t bytes;  // dynamic shared memory of a CTA
  bool resident;
};

inline int64_t shared_memory(int device) {
  return device_info(device).shared_bytes - static_cast<int64_t>(sizeof(Scratch));
}

// Return the largest number of elements in a row. Unfiltered draws have another limit. Every CTA holds the
// sums of all chunks of a row in its shared memory.
inline int64_t longest_row(bool keeps_maxima, int device) {
  constexpr int kOtherBytes = 64;  // static bytes of a kernel in addition to Scratch
  const int64_t memory = shared_memory(device) - kOtherBytes - GlobalRow::bytes(0, 0, keeps_maxima);
  const int64_t elements = memory / GlobalRow::chunk_bytes(keeps_maxima) * kSumChunk;
  return elements < kLongestRow ? elements : kLongestRow;
}

// Shape for rows that stay in shared memory. Long rows take one CTA per SM. The chunks of running rows that
// are not resident then fit into the L2 cache. A row is split over more CTAs while all rows still run at
// once.
inline Shape resident_shape(int64_t rows, int64_t vocab_size, int device) {
  const DeviceInfo& info = device_info(device);
  const int max_size = info.major >= 9 ? kMaxCluster : 1;
  const int64_t chunks = num_chunks(vocab_size);
  int size = 1;
  while (size < max_size && 2 * size * rows <= info.num_sms && chunks >= 16 * size) size *= 2;
  const int64_t own = ResidentRow::own_chunks(static_cast<int>(chunks), size);
  const bool is_long = own > 96 || size * rows <= info.num_sms;
  const int64_t memory = is_long ? shared_memory(device) : shared_memory(device) / 2 - 2048;
  const int64_t capacity = (memory - ResidentRow::bytes(chunks, 0, true)) / (kSumChunk * 4);
  if (capacity < 1) return {1, 512, GlobalRow::bytes(chunks, 0, false), false};
  const int threads = own > 16 && is_long ? 512 : 256;
  return {size, threads, ResidentRow::bytes(chunks, capacity < own ? capacity : own, true), true};
}

// Shape of unfiltered draws. A finer split takes longer: 64 rows in 256 CTAs take 27 us, in 128 CTAs 18 us.
inline Shape unfiltered_shape(int64_t rows, int64_t vocab_size, int device) {
  const DeviceInfo& info = device_info(device);
  const int64_t chunks = num_chunks(vocab_size);
  int size = 1;
  while (info.major >= 9 && size < kMaxCluster && 2 * size * rows <= info.num_sms && chunks >= 16 * size) size *= 2;
  return {size, chunks >= 16 * size ? 512 : 256, GlobalRow::bytes(chunks, 0, true), false};
}

// Shape of unfiltered draws from rows of any length (segments.cuh).
constexpr int kSegmentWarps = 16;  // of a CTA, one segment each
inline Shape segments_shape(int64_t rows, int64_t vocab_size, int device) {
  const int size = unfiltered_shape(rows, vocab_size, device).size;
  return {size, kSegmentWarps * 32, GlobalRow::bytes(size * kSegmentWarps, 0, true), false};
}

// Return true for rows that clusters hold in shared memory (cluster_smem.cuh). The device needs clusters, and
// most of the rows must run at once.
inline bool fits_cluster_smem(int64_t rows, int64_t vocab_size, int device) {
  const DeviceInfo& info = device_info(device);
  const int64_t chunks = num_chunks(vocab_size);
  return info.major >= 9 && chunks <= kClusterSmemChunks &&
         rows * ((chunks + kChunksPerCta - 1) / kChunksPerCta) <= 2 * info.num_sms;
}

inline Shape cluster_smem_shape(int64_t vocab_size) {
  const int chunks = static_cast<int>(num_chunks(vocab_size)), size = (chunks + kChunksPerCta - 1) / kChunksPerCta;
  return {size, kClusterSmemThreads, ClusterSmem::bytes(ResidentRow::own_chunks(chunks, size)), false};
}

// Shape for rows that persistent CTAs stream (stream.cuh), at least one row per SM. `bytes` is 0 if it does
// not serve the call.
inline Shape stream_shape(int64_t rows, int64_t vocab_size, int device) {
  const int64_t bytes = PipelinedRow::bytes();
  const bool serves =
      rows >= device_info(device).num_sms && PipelinedRow::fits(vocab_size) && bytes <= shared_memory(device);
  return {1, kClusterSmemThreads, serves ? bytes : 0, false};
}

inline int64_t stream_blocks(int64_t rows, int device) {
  const int64_t blocks = int64_t{kStreamBlocks} * device_info(device).num_sms;
  return rows < blocks ? rows : blocks;
}

template <auto kKernel, typename... Args>
void launch_rows(const Shape& shape, int64_t clusters, const Launch& where, const Args&... args) {
  Kernel<kKernel>::launch(dim3(static_cast<unsigned>(clusters * shape.size)),
                          dim3(static_cast<unsigned>(shape.threads)), shape.bytes, static_cast<unsigned>(shape.size),
                          where, args...);
}

// Split of outputs among clusters. In a call with indices of rows, a cluster has several outputs. Adjacent
// outputs of the same row share its load.
struct OutputSplit {
  int64_t outputs_per_cluster, clusters;

  static OutputSplit of(const SampleParams& p, const Shape& shape, int per_sm, int device) {
    const int64_t max_ctas = device_info(device).num_sms * per_sm / shape.size;
    const int64_t outputs = p.indices.data && p.num_outputs > max_ctas ? (p.num_outputs + max_ctas - 1) / max_ctas : 1;
    return {outputs, (p.num_outputs + outputs - 1) / outputs};
  }
};

// Launchers. Each is compiled in a file of csrc/sampling. A launcher with a bool result returns false if it
// does not serve the call.
bool launch_candidate_samples(const SampleParams& p, const Launch& where);
bool launch_nucleus_samples(const SampleParams& p, const Launch& where);
bool launch_nucleus_maps(const MapRowsParams& p, const Launch& where);
bool launch_candidate_maps(const MapRowsParams& p, const Launch& where);
void launch_cluster_smem_samples(const SampleParams& p, const Launch& where);
void launch_cluster_smem_maps(const MapRowsParams& p, const Launch& where);
void launch_samples(const SampleParams& p, const Launch& where);
void launch_maps(const MapRowsParams& p, const Launch& where);
void launch_masks(const MapRowsParams& p, const Launch& where);
void launch_top_k(const TopKParams& p, const Launch& where);
void launch_streamed_samples(const SampleParams& p, const Shape& shape, const OutputSplit& split, const Launch& where);
void launch_streamed_maps(const MapRowsParams& p, const Shape& shape, const Launch& where);

}  // namespace flashinfer::cuda
