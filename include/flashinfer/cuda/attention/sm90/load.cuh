// The producer warps. The first loads queries and keys, the second loads values. The third clears the values
// after the end of a request. If rows are gathered, it copies a third of each tile instead. With 8-bit types,
// it transposes and clears values (transpose.cuh), and only two warps gather.
#pragma once

#include <cstdint>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/sm90/gather.cuh>
#include <flashinfer/cuda/attention/sm90/shape.cuh>
#include <flashinfer/cuda/attention/sm90/work.cuh>
#include <flashinfer/cuda/profiler.cuh>
#include <flashinfer/cuda/ptx/tma.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>

namespace flashinfer::cuda::sm90 {

// Tensor maps. Dimensions of q and o: element, head of the group, token, KV head. Dimensions of k and v:
// element, row of the page, head, page. A box has kChunkRowBytes bytes of each row. A box of q has the tokens
// of a tile, a box of o those of a warpgroup.
struct TensorMaps {
  CUtensorMap q, k, v, o;
};

// Return true if an item's last tile has values after the end of the request. They may be NaN, and 0 * NaN
// is NaN. Gathered values are zeros there.
template <typename S>
__device__ __forceinline__ bool must_clear(const AttentionParams& params, const Work& work) {
  return work.first_key + work.tiles * S::kKeys > work.kv_len && !is_gathered(params.kv);
}

// Load the queries, keys and values of one item by TMA.
template <typename S>
struct TileLoader {
  const AttentionParams& params;
  const TensorMaps& maps;
  const Shared<S>& shared;
  const Work& work;

  // Return the page of this lane's kPageKeys keys of a tile. After the end of the request it is out of
  // bounds, so TMA writes zeros.
  __device__ __forceinline__ int32_t page_of(int32_t tile) const {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32 % (S::kKeys / kPageKeys);
    const int32_t key = work.first_key + tile * S::kKeys + lane * kPageKeys;
    if (tile < 0 || key >= work.kv_len) return static_cast<int32_t>(params.kv.num_pages);
    return params.kv.indices[work.kv_begin + static_cast<int32_t>(params.kv.page_size.div(key))];
  }

  // Copy a tile of keys or of values to `to`. `page` is page_of(tile).
  template <int kChunks, int kBytes>
  __device__ __forceinline__ void load(const CUtensorMap* map, uint32_t to, uint32_t barrier, int32_t tile,
                                       int32_t page) const {
    if (ptx::elect_one()) ptx::mbarrier_arrive_expect_tx(barrier, kBytes);
    __syncwarp();
    const int32_t key = work.first_key + tile * S::kKeys;
    if (params.kv.is_paged()) {
      constexpr int kPages = S::kKeys / kPageKeys;
      static_assert(kPages * kChunks <= 32, "each lane issues at most one copy");
      const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
      const int32_t part = lane % kPages, chunk = lane / kPages, first = key + part * kPageKeys;
      const auto in_page = static_cast<int32_t>(first - params.kv.page_size.div(first) * params.kv.page_size.divisor);
      if (chunk < kChunks)
        ptx::tma_load(to + chunk * S::Keys::kChunkBytes + part * kPageKeys * S::kChunkRowBytes, map, barrier,
                      chunk * S::kChunkElements, in_page, work.head, page);
      __syncwarp();
    } else if (ptx::elect_one()) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        ptx::tma_load(to + chunk * S::Keys::kChunkBytes, map, barrier, chunk * S::kChunkElements, work.kv_begin + key,
                      work.head, 0);
    }
  }

  __device__ __forceinline__ void keys(int use, int32_t tile, int32_t page) const {
    const typename S::KeyRing ring = shared.key_ring();
    ring.wait_empty(use);
    load<S::kChunksQ, S::kKBytes>(&maps.k, shared.keys(use), ring.full(use), tile, page);
  }

  __device__ __forceinline__ void values(int use, int32_t tile, int32_t page) const {
    if constexpr (S::kFp8) {
      const typename S::RawRing raw = shared.raw_ring();
      raw.wait_empty(use);
      load<S::kChunksV, S::kVBytes>(&maps.v, shared.raw_values(use), raw.full(use), tile, page);
      return;
    }
    const typename S::KeyRing ring = shared.value_ring();
    ring.wait_empty(use);
    const bool clear = tile == work.tiles - 1 && must_clear<S>(params, work);
    load<S::kChunksV, S::kVBytes>(&maps.v, shared.values(use), clear ? shared.uncleared(use) : ring.full(use), tile,
                                  page);
  }

  __device__ __forceinline__ void queries(int use) const {
    const typename S::QueryRing ring = shared.query_ring();
    ring.wait_empty(use);
    const auto token = work.qo_start + static_cast<int32_t>(params.group.div(work.row_start));
    if (ptx::elect_one()) {
      ptx::mbarrier_arrive_expect_tx(ring.full(use), params.tile_rows * S::kDQ * S::kElementBytes);
#pragma unroll
      for (int chunk = 0; chunk < S::kChunksQ; ++chunk)
        ptx::tma_load(shared.queries(use) + chunk * S::Queries::kChunkBytes, &maps.q, ring.full(use),
                      chunk * S::kChunkElements, 0, token, work.head);
    }
    __syncwarp();
  }
};

// Call load(use, tile, page) for the tiles of an item, from the last to the first. Pages are looked up two
// tiles ahead.
template <typename S, typename F>
__device__ __forceinline__ void for_tiles(const TileLoader<S>& loader, int& use, F load) {
  const bool paged = loader.params.kv.is_paged();
  const int32_t tiles = loader.work.tiles;
  int32_t page = paged ? loader.page_of(tiles - 1) : 0, next = paged ? loader.page_of(tiles - 2) : 0;
#pragma unroll 1
  for (int32_t tile = tiles - 1; tile >= 0; --tile, ++use) {
    const int32_t page_after = paged ? loader.page_of(tile - 2) : 0;
    load(use, tile, page);
    page = next, next = page_after;
  }
}

// Gatherers of an item's keys and values. The third warp has the last kThirdWarpRows rows of each tile.
template <typename S, bool kThirdWarp>
struct ItemGatherers {
  static constexpr int kFirstRow = kThirdWarp ? S::kKeys - S::kThirdWarpRows : 0;
  static constexpr int kNumRows = kThirdWarp ? S::kThirdWarpRows : S::kKeys - S::kThirdWarpRows;
  using Keys = Gatherer<S, S::kDQ * S::kElementBytes / 16, kFirstRow, kNumRows>;
  using Values = Gatherer<S, S::kDV * S::kElementBytes / 16, kFirstRow, kNumRows>;

  __device__ __forceinline__ static Keys keys(const KvCache& kv, const Shared<S>& shared, const Work& work) {
    return {kv,
            static_cast<const char*>(kv.k) + work.head * kv.k_head * S::kElementBytes,
            kv.k_page,
            kv.k_row,
            work.kv_begin,
            work.first_key,
            work.kv_len,
            shared.table(0)};
  }
  __device__ __forceinline__ static Values values(const KvCache& kv, const Shared<S>& shared, const Work& work) {
    return {kv,
            static_cast<const char*>(kv.v) + work.head * kv.v_head * S::kElementBytes,
            kv.v_page,
            kv.v_row,
            work.kv_begin,
            work.first_key,
            work.kv_len,
            shared.table(1)};
  }
};

// First producer warp: queries and keys of all items.
template <typename S, typename Track>
__device__ __forceinline__ void load_keys(const AttentionParams& params, const TensorMaps& maps,
                                          const Shared<S>& shared, Track& profiler) {
  const typename S::WorkRing work_ring = shared.work_ring();
  const KvCache& kv = params.kv;
  int key_use = 0, query_use = 0;
  for (int use = 0;; ++use) {
    work_ring.wait_full(use);
    const Work& work = shared.work(use);
    if (work.tiles < 0) return;
    const TileLoader<S> loader{params, maps, shared, work};
    profiler.begin(Event::kItem);
    if (is_gathered(kv)) {
      if (work.tiles > 0) loader.queries(query_use++);
      const auto gatherer = ItemGatherers<S, false>::keys(kv, shared, work);
      gatherer.copy_all(shared.key_ring(), key_use, work.tiles, [&](int n) { return shared.keys(n); });
    } else {
      for_tiles<S>(loader, key_use, [&](int n, int32_t tile, int32_t page) {
        profiler.begin(Event::kLoadKv);
        loader.keys(n, tile, page);
        profiler.end(Event::kLoadKv);
        if (tile == work.tiles - 1) loader.queries(query_use++);
      });
    }
    profiler.end(Event::kItem);
    __syncwarp();
    if (ptx::elect_one()) work_ring.release(use);
  }
}

// Second producer warp: values of all items.
template <typename S>
__device__ __forceinline__ void load_values(const AttentionParams& params, const TensorMaps& maps,
                                            const Shared<S>& shared) {
  const typename S::WorkRing work_ring = shared.work_ring();
  const KvCache& kv = params.kv;
  int value_use = 0;
  for (int use = 0;; ++use) {
    work_ring.wait_full(use);
    const Work& work = shared.work(use);
    if (work.tiles < 0) return;
    if (is_gathered(kv)) {
      const auto gatherer = ItemGatherers<S, false>::values(kv, shared, work);
      if constexpr (S::kFp8) {
        gatherer.copy_all(shared.raw_ring(), value_use, work.tiles, [&](int n) { return shared.raw_values(n); });
      } else {
        gatherer.copy_all(shared.value_ring(), value_use, work.tiles, [&](int n) { return shared.values(n); });
      }
    } else {
      const TileLoader<S> loader{params, maps, shared, work};
      for_tiles<S>(loader, value_use, [&](int n, int32_t tile, int32_t page) { loader.values(n, tile, page); });
    }
    __syncwarp();
    if (ptx::elect_one()) work_ring.release(use);
  }
}

// Third producer warp if rows of 16-bit types are gathered: the last rows of each tile of keys and of values.
template <typename S>
__device__ __forceinline__ void gather_last_rows(const AttentionParams& params, const Shared<S>& shared) {
  using Gatherers = ItemGatherers<S, true>;
  const typename S::WorkRing work_ring = shared.work_ring();
  const typename S::KeyRing key_ring = shared.key_ring(), value_ring = shared.value_ring();
  int tile_use = 0;
  for (int use = 0;; ++use) {
    work_ring.wait_full(use);
    const Work& work = shared.work(use);
    if (work.tiles < 0) return;
    int32_t pages[Gatherers::Keys::kRounds];
    Gatherers::keys(params.kv, shared, work).look_up(pages, work.tiles - 1);
#pragma unroll 1
    for (int32_t tile = work.tiles - 1; tile >= 0; --tile, ++tile_use) {
      const Work* reloaded = &work;
      asm volatile("" : "+l"(reloaded));  // recomputes dependent values per tile: this warp has few registers
      key_ring.wait_empty(tile_use);
      Gatherers::keys(params.kv, shared, *reloaded).copy(pages, tile, shared.keys(tile_use), key_ring.full(tile_use));
      value_ring.wait_empty(tile_use);
      const auto values = Gatherers::values(params.kv, shared, *reloaded);
      values.copy(pages, tile, shared.values(tile_use), value_ring.full(tile_use));
      values.look_up(pages, tile - 1);
    }
    __syncwarp();
    if (ptx::elect_one()) work_ring.release(use);
  }
}

// Third producer warp if rows of 16-bit types are not gathered: clear the values after the end of a request,
// before the consumers read them.
template <typename S>
__device__ __forceinline__ void clear_tails(const AttentionParams& params, const Shared<S>& shared) {
  const typename S::WorkRing work_ring = shared.work_ring();
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  uint32_t parities = 0;  // a bit per stage
  int value_use = 0;
  for (int use = 0;; ++use) {
    work_ring.wait_full(use);
    const Work& work = shared.work(use);
    const int32_t tiles = work.tiles, last_tile_start = work.first_key + (tiles - 1) * S::kKeys;
    const int32_t valid_rows = work.kv_len - last_tile_start;  // rows of the last tile
    const bool clears = tiles > 0 && must_clear<S>(params, work);
    __syncwarp();
    if (lane == 0) work_ring.release(use);
    if (tiles < 0) return;
    if (clears) {
      const int stage = S::KeyRing::stage(value_use);
      ptx::mbarrier_wait(shared.uncleared(value_use), parities >> stage & 1);
      parities ^= 1u << stage;
      uint8_t* values = shared.bytes + S::kValuesAt + stage * S::kVBytes;
      for (int i = lane; i < (S::kKeys - valid_rows) * 8; i += 32) {
#pragma unroll
        for (int chunk = 0; chunk < S::kChunksV; ++chunk)
          *reinterpret_cast<uint4*>(values + chunk * S::Keys::kChunkBytes + valid_rows * 128 + i * 16) =
              uint4{0, 0, 0, 0};
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) shared.value_ring().arrive_full(value_use);
    }
    value_use += tiles;
  }
}

}  // namespace flashinfer::cuda::sm90
