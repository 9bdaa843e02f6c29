// Keys and values of a decode step as boxes of TMA. Each warp has a ring of stages of its own: it waits for a stage's
// barrier, computes, and starts the copies of a later tile into the same stage, so that no warp waits for another one
// and no barrier says that a stage is free. A box is a line of 16 keys (see swizzle.cuh), which lie on one page; each
// of the lanes that start copies has its own box of every tile.
#pragma once

#include <cuda.h>

#include <cstdint>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/shape.cuh>
#include <flashinfer/cuda/ptx/mbarrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/ptx/tma.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>
#include <flashinfer/cuda/tile/swizzle.cuh>

namespace flashinfer::cuda::sm90 {

constexpr int kBoxKeys = 16;

struct KeyMaps {
  CUtensorMap k, v;
};

template <typename S>
struct BoxLoader {
  using KRows = Swizzle<S::kKRow, S::kKeys>;
  using VRows = Swizzle<S::kVRow, S::kKeys>;
  static constexpr int kLinesOfKeys = S::kKRow / KRows::kLine, kLines = kLinesOfKeys + S::kVRow / VRows::kLine;
  static constexpr int kBoxes = S::kKeys / kBoxKeys * kLines, kTogether = 32 / kBoxes;  // kTogether: tiles
  static constexpr int kStride = S::kKeys * S::kKeyWarps;                               // to the warp's next tile
  static_assert(S::kRowWarps == 1 && kBoxes <= 32, "a lane has a box of a tile");
  static_assert(S::kQBytes % 1024 == 0 && S::kKBytes % 1024 == 0 && S::kVBytes % 1024 == 0, "swizzles repeat there");

  const KvCache& kv;
  int32_t head, first;            // first: where the request's pages or rows start
  int32_t kv_start, kv_end;       // the keys that there are; others of a tile are none of the item's
  int32_t start;                  // of the warp's first tile, a multiple of kBoxKeys
  uint32_t ring, barriers;        // shared memory of the warp
  int32_t lane, box_key, column;  // of the lane's box in a tile
  uint32_t box_at;                // in a stage
  const CUtensorMap* map;

  __device__ __forceinline__ BoxLoader(const KvCache& cache, const KeyMaps& maps, const WorkItem& item, int32_t head_,
                                       uint32_t shared, int stages)
      : kv(cache),
        head(head_),
        first(cache.indptr ? cache.indptr[item.batch] : 0),
        kv_start(item.kv_start),
        kv_end(item.kv_end) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int32_t>(threadIdx.x) % 32;
    start = kv_start / kBoxKeys * kBoxKeys + warp * S::kKeys;
    ring = shared + S::ring(warp, stages), barriers = shared + S::table(warp, stages);
    const int box = lane % kBoxes, line = box % kLines;
    const bool of_values = line >= kLinesOfKeys;
    const int own = of_values ? line - kLinesOfKeys : line, pitch = of_values ? VRows::kLine : KRows::kLine;
    box_key = box / kLines * kBoxKeys, column = own * pitch / static_cast<int>(sizeof(typename S::KV));
    box_at = (of_values ? S::kKBytes : 0) + (own * S::kKeys + box_key) * pitch;
    map = of_values ? &maps.v : &maps.k;
  }

  // Before anything else, also before the kernel in front of this one has ended: its parameters are all that is read.
  __device__ __forceinline__ static void init(const KeyMaps& maps, uint32_t shared, int stages) {
    const int warp = static_cast<int>(threadIdx.x) / 32, thread = static_cast<int>(threadIdx.x) % 32;
    if (thread < stages) ptx::mbarrier_init(shared + S::table(warp, stages) + 8 * thread, 1);
    ptx::mbarrier_fence_init();
    if (threadIdx.x == 0) ptx::tma_prefetch(&maps.k), ptx::tma_prefetch(&maps.v);
    __syncwarp();
  }

  // The page of the lane's box of a tile.
  __device__ __forceinline__ int32_t page_of(int32_t tile_start) const {
    const int32_t t = tile_start + box_key;
    return kv.is_paged() && t < kv_end ? kv.indices[first + static_cast<int32_t>(kv.page_size.div(t))] : 0;
  }

  // Starts the copies of the first tiles, as many as there are stages. All pages are looked up before the first copy.
  __device__ __forceinline__ void load_first(int stages) const {
#pragma unroll 1
    for (int i = 0; i < stages; i += kTogether) {
      const int stage = i + lane / kBoxes;
      const int32_t tile_start = start + stage * kStride;
      const bool loads = lane / kBoxes < kTogether && stage < stages && tile_start < kv_end;
      start_copies(loads, stage, tile_start, loads ? page_of(tile_start) : 0);
    }
  }

  // Starts the copies of a tile into a stage that the warp is done with.
  __device__ __forceinline__ void load(int stage, int32_t tile_start, int32_t page) const {
    __syncwarp();
    if (tile_start < kv_end) start_copies(lane < kBoxes, stage, tile_start, page);
  }

  // Zeros in the place of values that are none of the item's: what is there may be NaN, and 0 * NaN is NaN.
  __device__ __forceinline__ void clear_others(uint32_t values, int32_t tile_start) const {
    if (tile_start >= kv_start && tile_start + S::kKeys <= kv_end) return;
    constexpr int kInRow = S::kVRow / 16;
#pragma unroll 1
    for (int i = lane; i < S::kKeys * kInRow; i += 32) {
      const int32_t row = i / kInRow, t = tile_start + row;
      if (t < kv_start || t >= kv_end)
        ptx::store_shared_16(VRows::chunk(VRows::row(values, row), i % kInRow), uint4{0, 0, 0, 0});
    }
    ptx::fence_proxy_async();  // copies may follow into the same stage
    __syncwarp();
  }

 private:
  // By all lanes; those that load bring the stage and the tile of their box. The lane of a tile's first box says how
  // many bytes its barrier waits for, before any copy can be done. A box behind the last key lies outside of its page,
  // where nothing is read and zeros arrive.
  __device__ __forceinline__ void start_copies(bool loads, int stage, int32_t tile_start, int32_t page) const {
    const uint32_t barrier = barriers + 8 * stage;
    if (loads && lane % kBoxes == 0) ptx::mbarrier_arrive_expect_tx(barrier, S::kStageBytes);
    __syncwarp();
    if (!loads) return;
    const int32_t t = tile_start + box_key, size = static_cast<int32_t>(kv.page_size.divisor);
    int32_t row = kv.is_paged() ? t - static_cast<int32_t>(kv.page_size.div(t)) * size : first + t;
    if (t >= kv_end) row = kv.is_paged() ? size : static_cast<int32_t>(kv.num_pages);
    ptx::tma_load(ring + stage * S::kStageBytes + box_at, map, barrier, column, row, head, page);
  }
};

}  // namespace flashinfer::cuda::sm90
