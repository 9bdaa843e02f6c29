// Writes to paged caches on CUDA. The host reads no index, so an invalid one raises no error: its token is
// skipped.
#pragma once

#include <cstdint>

#include <flashinfer/common/page.h>
#include <flashinfer/common/search.h>
#include <flashinfer/cuda/host/launch.cuh>

namespace flashinfer::cuda {

constexpr int kAppendThreads = 256;
constexpr int kWordsPerThread = 4;  // independent loads of each thread in flight

// The threads of threadIdx.x move a token's row in words. threadIdx.y counts tokens, blockIdx.y the two
// streams.
template <typename Word>
__global__ void __launch_bounds__(kAppendThreads) append_paged_kernel(const AppendParams p) {
  const PagedStream s = blockIdx.y == 0 ? p.streams[0] : p.streams[1];
  const uint32_t row_words = s.row_bytes / sizeof(Word), num_words = row_words * s.num_heads;
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const uint32_t step = blockDim.x * kWordsPerThread;
  const auto at = [&](uint32_t word, int64_t head_stride) {
    if (s.num_heads == 1) return word * static_cast<int64_t>(sizeof(Word));
    return word / row_words * head_stride + word % row_words * static_cast<int64_t>(sizeof(Word));
  };
  const char* from = s.tokens + token * s.token_stride;
  Word words[kWordsPerThread];
  const auto load = [&](uint32_t start) {
#pragma unroll
    for (int i = 0; i < kWordsPerThread; ++i) {
      const uint32_t word = start + i * blockDim.x;
      if (word < num_words) words[i] = *reinterpret_cast<const Word*>(from + at(word, s.token_head_stride));
    }
  };
  wait_for_inputs();
  if (token < p.num_tokens && threadIdx.x < num_words) {
    load(threadIdx.x);  // in flight while the chain of indices is resolved
    const Slot slot = find_slot(p, token);
    if (slot.page >= 0) {
      char* to = s.cache + slot.page * s.page_stride + slot.entry * s.slot_stride;
      for (uint32_t start = threadIdx.x;;) {
#pragma unroll
        for (int i = 0; i < kWordsPerThread; ++i) {
          const uint32_t word = start + i * blockDim.x;
          if (word < num_words) *reinterpret_cast<Word*>(to + at(word, s.head_stride)) = words[i];
        }
        start += step;
        if (start >= num_words) break;
        load(start);
      }
    }
  }
  launch_dependents();
}

// Return true if every row of both streams can be moved in words of this size.
inline bool fits_words(const AppendParams& p, int64_t bytes) {
  for (const PagedStream& s : p.streams) {
    const int64_t all = reinterpret_cast<intptr_t>(s.tokens) | reinterpret_cast<intptr_t>(s.cache) | s.token_stride |
                        s.token_head_stride | s.page_stride | s.slot_stride | s.head_stride | s.row_bytes;
    if (all & (bytes - 1)) return false;
  }
  return true;
}

template <typename Word>
void append_paged_as(const AppendParams& p, const Launch& where) {
  int64_t num_words = 1;
  for (const PagedStream& s : p.streams) {
    const int64_t words = s.num_heads * s.row_bytes / static_cast<int64_t>(sizeof(Word));
    if (words > num_words) num_words = words;
  }
  unsigned threads = 1;
  while (threads < kAppendThreads && threads * kWordsPerThread < num_words) threads *= 2;
  const dim3 block(threads, kAppendThreads / threads);
  launch(append_paged_kernel<Word>, dim3((p.num_tokens + block.y - 1) / block.y, 2), block, where, p);
}

inline void append_paged(const AppendParams& p, const Launch& where) {
  if (fits_words(p, 16)) return append_paged_as<uint4>(p, where);
  if (fits_words(p, 4)) return append_paged_as<uint32_t>(p, where);
  if (fits_words(p, 2)) return append_paged_as<uint16_t>(p, where);
  append_paged_as<uint8_t>(p, where);
}

constexpr int kIndexThreads = 256;

inline dim3 index_grid(int64_t count) { return dim3((count + kIndexThreads - 1) / kIndexThreads); }

__global__ void __launch_bounds__(kIndexThreads) batch_indices_positions_kernel(const PositionsParams p) {
  const int64_t token = int64_t{blockIdx.x} * kIndexThreads + threadIdx.x;
  wait_for_inputs();
  if (token < p.num_tokens) {
    int32_t request = -1, position = -1;  // for a token of no request
    if (p.batch_size > 0) {
      const int64_t found =
          last_at_or_before(int64_t{0}, p.batch_size, token, [&](int64_t r) { return p.append_indptr[r]; });
      const int64_t end = p.append_indptr[found + 1];
      if (p.append_indptr[found] <= token && token < end) {
        request = static_cast<int32_t>(found);
        position = static_cast<int32_t>(p.seq_lens[found] - (end - token));
      }
    }
    p.batch_indices[token] = request, p.positions[token] = position;
  }
  launch_dependents();
}

inline void batch_indices_positions(const PositionsParams& p, const Launch& where) {
  launch(batch_indices_positions_kernel, index_grid(p.num_tokens), dim3(kIndexThreads), where, p);
}

// blockIdx.x counts requests; the CTAs of a column share a request's entries.
__global__ void __launch_bounds__(kIndexThreads) block_offsets_kernel(const BlockOffsetsParams p) {
  const int64_t b = blockIdx.x;
  wait_for_inputs();
  const int64_t length = p.kv_lens[b], from = p.block_indptr[b], to = p.indptr[b];
  for (int64_t i = int64_t{blockIdx.y} * kIndexThreads + threadIdx.x; i < length;
       i += int64_t{gridDim.y} * kIndexThreads) {
    const int64_t block = from + i / p.block_size, at = to + i;
    if (block < 0 || block >= p.num_indices || at < 0 || at >= p.num_offsets) continue;
    const int64_t offset = p.block_indices[block] * p.stride_block + i % p.block_size * p.stride_n;
    if (offset >= INT32_MIN && offset <= INT32_MAX) p.offsets[at] = static_cast<int32_t>(offset);
  }
  launch_dependents();
}

inline void block_offsets(const BlockOffsetsParams& p, const Launch& where) {
  const int64_t mean = p.batch_size ? p.num_offsets / p.batch_size : 0, columns = mean / (4 * kIndexThreads) + 1;
  launch(block_offsets_kernel, dim3(p.batch_size, columns < 64 ? columns : 64), dim3(kIndexThreads), where, p);
}

}  // namespace flashinfer::cuda
