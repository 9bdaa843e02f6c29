// Producer code of the portable attention kernel: copies of keys and values to shared memory.
#pragma once

#include <cstdint>
#include <cstdio>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/shape.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/tile/swizzle.cuh>

namespace flashinfer::cuda {

#if defined(FLASHINFER_DEBUG)
constexpr bool kDebug = true;
#else
constexpr bool kDebug = false;
#endif

// Load a group's tiles of an item's keys and values, for one head. The rows of a tile are looked up one tile
// before its copies start. The copies start one or more tiles before their use.
template <typename S>
struct KeyLoader {
  const KvCache& kv;
  const char *k, *v;       // of the head
  int32_t first;           // the request's first page or row
  int32_t start, kv_end;   // the group's first tile, and the end of the CTA's keys
  int32_t thread;          // index of the thread in its group
  uint32_t ring, rotated;  // shared memory of the group
  KvRow* table;
  static constexpr int kKeys = S::kKeys, kThreads = S::kGroupThreads;
  static constexpr int kStride = kKeys * S::kKeyWarps;  // from one of its tiles to the next

  __device__ __forceinline__ KeyLoader(const KvCache& cache, const WorkItem& item, int32_t head, uint8_t* shared,
                                       int stages)
      : kv(cache),
        k(static_cast<const char*>(cache.k) + head * cache.k_head * sizeof(typename S::KV)),
        v(static_cast<const char*>(cache.v) + (head * cache.v_head + first_column<S>()) * sizeof(typename S::KV)),
        first(cache.indptr ? cache.indptr[item.batch] : 0),
        kv_end(item.kv_end) {
    const int group = S::kKeyWarps == 1 ? 0 : threadIdx.x / kThreads;
    start = item.kv_start + group * kKeys, thread = static_cast<int32_t>(threadIdx.x) - group * kThreads;
    ring = ptx::shared_address(shared) + S::ring(group, stages);
    rotated = ptx::shared_address(shared) + S::rotated(group, stages);
    table = reinterpret_cast<KvRow*>(shared + S::table(group, stages));
  }

  // Synchronise the threads of the group and make their writes visible.
  __device__ __forceinline__ static void sync() {
    if constexpr (S::kRowWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // Separate from row_of(), so that other work can hide the load's latency.
  __device__ __forceinline__ int32_t page_of(int32_t t) const {
    if (!kv.is_paged() || t >= kv_end) return 0;
    // No read-only path: the kernel before this one may have written the table.
    const int32_t page = kv.indices[first + static_cast<int32_t>(kv.page_size.div(t))];
    if (kDebug) require_inside(page, t);
    return page;
  }

  __device__ __forceinline__ KvRow row_of(int32_t t, int32_t page) const {
    if (t >= kv_end) return {k, v};  // after the last key: nothing is read
    int64_t row = static_cast<int64_t>(first) + t;
    if (kv.is_paged()) row = t - static_cast<int32_t>(kv.page_size.div(t) * kv.page_size.divisor);
    if (kDebug && !kv.is_paged()) require_inside(row, t);
    constexpr int64_t kSize = sizeof(typename S::KV);
    return {k + kv.k_offset(page, row) * kSize, v + kv.v_offset(page, row) * kSize};
  }

  // Look up the rows of the first tiles, one per stage.
  __device__ __forceinline__ void find_first_rows(int stages) const {
    constexpr int kCount = (S::kMaxStages * kKeys + kThreads - 1) / kThreads;
    int32_t pages[kCount];  // all loads come before the first use
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int i = thread + n * kThreads;
      pages[n] = i < stages * kKeys ? page_of(start + i / kKeys * kStride + i % kKeys) : 0;
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int i = thread + n * kThreads;
      if (i < stages * kKeys) table[i] = row_of(start + i / kKeys * kStride + i % kKeys, pages[n]);
    }
  }

  // Start the copies of a tile, whose rows are in the stage's table. Rows after the end are zeros: the cache
  // may hold NaN there, and 0 * NaN is NaN.
  __device__ __forceinline__ void load(int stage, int32_t tile_start) const {
    const uint32_t to = ring + stage * S::kStageBytes;
    const KvRow* rows = table + stage * kKeys;
    const int32_t left = kv_end - tile_start;
    if (left >= kKeys) {
      copy_tile<true>(to, rows, left);
    } else {
      copy_tile<false>(to, rows, left);
    }
  }

 private:
  // Stop the program instead of reading outside of the cache.
  __device__ __forceinline__ void require_inside(int64_t page, int32_t t) const {
    if (page >= 0 && page < kv.num_pages) return;
    printf("attention: token %d is on page (row, where ragged) %lld of a cache of %lld\n", t,
           static_cast<long long>(page), static_cast<long long>(kv.num_pages));
    __trap();
  }

  // The 16-byte chunks of rows of kRow bytes that a thread copies. Chunk i is part of row(i) and goes to
  // at(to, i).
  template <int kRow>
  struct Chunks {
    static constexpr int kInRow = kRow / 16, kInTile = kKeys * kInRow;
    static constexpr int kCount = (kInTile + kThreads - 1) / kThreads;
    static constexpr bool kSameColumn = kThreads % kInRow == 0;
    static constexpr int kStep = kSameColumn ? kThreads / kInRow : 1;
    int thread;
    uint32_t first;

    __device__ __forceinline__ explicit Chunks(int thread_)
        : thread(thread_), first(Swizzle<kRow>::chunk(Swizzle<kRow>::row(0, thread / kInRow), thread % kInRow)) {}

    __device__ __forceinline__ int row(int i) const {
      return kSameColumn ? thread / kInRow + i * kStep : (thread + i * kThreads) / kInRow;
    }
    __device__ __forceinline__ int column(int i) const {
      return kSameColumn ? thread % kInRow : (thread + i * kThreads) % kInRow;
    }
    // Return true if a thread has more than i chunks.
    __device__ __forceinline__ bool has(int i) const {
      return kInTile % kThreads == 0 || thread + i * kThreads < kInTile;
    }
    // `to` is a multiple of 128.
    __device__ __forceinline__ uint32_t at(uint32_t to, int i) const {
      if constexpr (kSameColumn) {
        // Rows add without a carry, and so do their swizzled addresses.
        const uint32_t pattern = Swizzle<kRow>::row(0, i * kStep) - i * kStep * kRow;
        return ((to + first) ^ pattern) + i * kStep * kRow;
      } else {
        return Swizzle<kRow>::chunk(Swizzle<kRow>::row(to, row(i)), column(i));
      }
    }
  };

  template <bool kFull>
  __device__ __forceinline__ void copy_tile(uint32_t to, const KvRow* rows, int32_t left) const {
    if constexpr (S::kKRowBytes == S::kVRowBytes) {
      copy_rows<kFull, S::kKRowBytes, true, true>(to, rows, left);
    } else {
      copy_rows<kFull, S::kKRowBytes, true, false>(to, rows, left);
      copy_rows<kFull, S::kVRowBytes, false, true>(to, rows, left);
    }
  }

  // Copy rows of keys, of values, or of both if they have the same chunks.
  template <bool kFull, int kRow, bool kKeyRows, bool kValueRows>
  __device__ __forceinline__ void copy_rows(uint32_t to, const KvRow* rows, int32_t left) const {
    constexpr int kCount = Chunks<kRow>::kCount, kAtOnce = kCount % 8 == 0 ? 8 : kCount;
    const Chunks<kRow> chunks(thread);
#pragma unroll
    for (int start = 0; start < kCount; start += kAtOnce) {
      KvRow from[kAtOnce];  // before the copies: otherwise each copy would wait for its load
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (chunks.has(start + i)) from[i] = rows[chunks.row(start + i)];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!chunks.has(start + i)) continue;
        const int n = start + i, byte = chunks.column(n) * 16;
        const bool in_range = chunks.row(n) < left;
        if constexpr (kKeyRows) copy<kFull>(chunks.at(to, n), from[i].k + byte, in_range);
        if constexpr (kValueRows) copy<kFull>(chunks.at(to + S::kKBytes, n), from[i].v + byte, in_range);
      }
    }
  }

  template <bool kFull>
  __device__ __forceinline__ static void copy(uint32_t to, const char* from, bool in_range) {
    if constexpr (kFull) {
      ptx::cp_async_16(to, from);
    } else {
      ptx::cp_async_16(to, from, in_range);
    }
  }
};

}  // namespace flashinfer::cuda
