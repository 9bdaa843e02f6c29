// How the kernels of this family are launched: a cluster of blocks to a row, in as many blocks as there is memory for.
#pragma once

#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/sampling/stream.cuh>

namespace flashinfer::cuda {

// A cluster of `size` blocks has a row.
struct Shape {
  int size, threads;
  int64_t bytes;  // of shared memory, of each block
  bool resident;
};

inline int64_t shared_memory(int device) {
  return device_info(device).shared_bytes - static_cast<int64_t>(sizeof(Scratch));
}

// Rows that are not resident have numbers of every chunk in the shared memory of each block.
inline int64_t longest_row(bool keeps_maxima, int device) {
  constexpr int kOthers = 64;  // static bytes of a kernel beside Scratch
  const int64_t memory = shared_memory(device) - kOthers - Engine<false>::bytes(0, 0, keeps_maxima);
  const int64_t elements = memory / Engine<false>::chunk_bytes(keeps_maxima) * kSumChunk;
  return elements < kLongestRow ? elements : kLongestRow;
}

// A block to an SM where rows are long: those in flight, but for what is kept in shared memory, fit into the L2 cache.
// Rows are parted as far as there are SMs for all of them at once.
inline Shape resident_shape(int64_t rows, int64_t vocab_size, int device) {
  const DeviceInfo& info = device_info(device);
  const int most = info.major >= 9 ? kMaxCluster : 1;
  const int64_t chunks = num_chunks(vocab_size);
  int size = 1;
  while (size < most && 2 * size * rows <= info.num_sms && chunks >= 16 * size) size *= 2;
  const int64_t own = Engine<true>::own_chunks(static_cast<int>(chunks), size);
  const bool is_long = own > 96 || size * rows <= info.num_sms;
  const int64_t memory = is_long ? shared_memory(device) : shared_memory(device) / 2 - 2048;
  const int64_t room = (memory - Engine<true>::bytes(chunks, 0, true)) / (kSumChunk * 4);
  if (room < 1) return {1, 512, Engine<false>::bytes(chunks, 0, false), false};
  const int threads = own > 16 && is_long ? 512 : 256;
  return {size, threads, Engine<true>::bytes(chunks, room < own ? room : own, true), true};
}

// A row parted further than that takes longer: 64 rows in 256 blocks 27 us, in 128 blocks 18.
inline Shape plain_shape(int64_t rows, int64_t vocab_size, int device) {
  const DeviceInfo& info = device_info(device);
  const int64_t chunks = num_chunks(vocab_size);
  int size = 1;
  while (info.major >= 9 && size < kMaxCluster && 2 * size * rows <= info.num_sms && chunks >= 16 * size) size *= 2;
  return {size, chunks >= 16 * size ? 512 : 256, Engine<false>::bytes(chunks, 0, true), false};
}

// Rows that a cluster holds (held.cuh), where there are clusters and most of the rows are at work at once.
inline bool is_held(int64_t rows, int64_t vocab_size, int device) {
  const DeviceInfo& info = device_info(device);
  const int64_t chunks = num_chunks(vocab_size);
  return info.major >= 9 && chunks <= kHeldChunks &&
         rows * ((chunks + kOwnChunks - 1) / kOwnChunks) <= 2 * info.num_sms;
}

inline Shape held_shape(int64_t vocab_size) {
  const int chunks = static_cast<int>(num_chunks(vocab_size)), size = (chunks + kOwnChunks - 1) / kOwnChunks;
  return {size, kHeldThreads, Held::bytes(Engine<true>::own_chunks(chunks, size)), false};
}

// Rows that blocks read one after the other (stream.cuh), where there is one for each SM. Without bytes: not these.
inline Shape stream_shape(int64_t rows, int64_t vocab_size, int device) {
  const int64_t bytes = StreamRow::bytes();
  const bool serves =
      rows >= device_info(device).num_sms && StreamRow::fits(vocab_size) && bytes <= shared_memory(device);
  return {1, kHeldThreads, serves ? bytes : 0, false};
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

// Where outputs name their rows, a cluster takes several outputs: those of one row may share it.
struct Groups {
  int64_t outputs, count;

  static Groups of(const SampleParams& p, const Shape& shape, int per_sm, int device) {
    const int64_t most = device_info(device).num_sms * per_sm / shape.size;
    const int64_t each = p.indices.data && p.num_outputs > most ? (p.num_outputs + most - 1) / most : 1;
    return {each, (p.num_outputs + each - 1) / each};
  }
};

// Each kernel of a family of kernels is compiled in a file of its own.
bool launch_few_samples(const SampleParams& p, const Launch& where);  // whether it is what they are for
bool launch_nucleus_samples(const SampleParams& p, const Launch& where);
bool launch_nucleus_maps(const MapRowsParams& p, const Launch& where);
bool launch_few_maps(const MapRowsParams& p, const Launch& where);
void launch_held_samples(const SampleParams& p, const Launch& where);
void launch_held_maps(const MapRowsParams& p, const Launch& where);
void launch_samples(const SampleParams& p, const Launch& where);
void launch_maps(const MapRowsParams& p, const Launch& where);
void launch_masks(const MapRowsParams& p, const Launch& where);
void launch_top_k(const TopKParams& p, const Launch& where);
void launch_streamed_samples(const SampleParams& p, const Shape& shape, const Groups& groups, const Launch& where);
void launch_streamed_maps(const MapRowsParams& p, const Shape& shape, const Launch& where);

}  // namespace flashinfer::cuda
