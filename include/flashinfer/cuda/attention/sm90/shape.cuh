// Shapes of the Hopper attention kernel that are known when it is compiled, and what its shared memory holds.
//
// A block has kGroups warpgroups that compute, with 64 rows of queries each, and one that loads. All of them go through
// the same tiles of keys. A block lives as long as the kernel and takes one work item after the other.
#pragma once

#include <cstdint>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/tile/descriptor.cuh>
#include <flashinfer/cuda/tile/ring.cuh>

namespace flashinfer::cuda::sm90 {

constexpr int kPageKeys = 16;  // keys that one copy brings where the cache is paged

// kKeys: keys of a tile. kStages: tiles of keys, and of values, in shared memory. kQueries: tiles of queries there.
// kOutputColumns: how many columns of the outputs wait there at a time to be copied.
// kRawStages: tiles of values of 8 bits there that are still to be transposed.
template <int kGroups_, int kKeys_, int kStages_, int kQueries_, int kOutputColumns_, int kRawStages_ = 1,
          int kLoadRegisters_ = kGroups_ == 2 ? 40 : 32>
struct Tile {
  static constexpr int kRawStages = kRawStages_;
  static constexpr int kGroups = kGroups_, kKeys = kKeys_, kStages = kStages_, kQueries = kQueries_;
  static constexpr int kOutputColumns = kOutputColumns_;
  static constexpr int kRows = 64 * kGroups, kComputeThreads = 128 * kGroups, kThreads = kComputeThreads + 128;
  // ptxas compiles for 65536 registers over all threads; the loading warpgroup gives most of its own away.
  static constexpr int kLoadRegisters = kLoadRegisters_;
  static constexpr int kComputeRegisters = ((kGroups == 2 ? 504 : 512) - kLoadRegisters) / kGroups;
  static_assert(kLoadRegisters % 8 == 0 && kComputeRegisters % 8 == 0, "registers come by eights");
  static_assert(kGroups == 2 || kGroups == 3, "registers are shared out for two or three warpgroups that compute");
  static_assert(kKeys % 16 == 0, "pages are copied by 16 keys");
};

// A work item on its way through a block: what the block's warps need to know of it.
struct alignas(32) Work : WorkItem {
  int32_t head;       // of the keys
  int32_t tiles;      // of keys; -1: there is no more work
  int32_t first_key;  // of the first tile: kv_start, or less
  int32_t first_row;  // where the request's pages or rows start
};

template <typename Types_, typename Tile_>
struct Shape : Types_, Tile_ {
  using Types = Types_;
  using Tile = Tile_;
  static constexpr int kDQ = Types::HEAD_DIM_QK, kDV = Types::HEAD_DIM_VO;
  static_assert(kDQ % 64 == 0 && kDV % 64 == 0 && kDQ >= kDV, "head dimensions are whole chunks of 64 elements");
  static_assert(sizeof(typename Types::DTypeQ) == sizeof(typename Types::DTypeKV) && !Types::kRope,
                "keys are used as they are");
  // Products of 8 bits need values whose keys are contiguous: a warp transposes tiles, from those that were copied.
  static constexpr bool kFp8 = Types::kFp8;
  static constexpr int kElement = kFp8 ? 1 : 2;  // bytes of queries, keys, values

  // What the pieces shared with other kernels read: fragments of 16 rows and 8 columns.
  static constexpr int kM = 1, kRowWarps = 4 * Tile::kGroups, kNKeys = Tile::kKeys / 8, kNOut = kDV / 8;

  static constexpr int kWidth = kDQ * kElement % 128 == 0 && kDV * kElement % 128 == 0 ? 128 : 64;  // of a chunk's row
  using Queries = ChunkedTile<Tile::kRows, kWidth>;
  using Keys = ChunkedTile<Tile::kKeys, kWidth>;  // and values as they are copied
  using Transposed = ChunkedTile<kDV, Tile::kKeys % 128 == 0 ? 128 : Tile::kKeys % 64 == 0 ? 64 : 32>;
  static constexpr int kChunkElements = kWidth / kElement;
  static constexpr int kChunksQ = kDQ / kChunkElements, kChunksV = kDV / kChunkElements;
  static constexpr int kWeightRegisters = Tile::kKeys * kElement / 8;  // of a thread, for a tile
  static constexpr int kQBytes = Tile::kRows * kDQ * kElement, kKBytes = Tile::kKeys * kDQ * kElement;
  static constexpr int kVBytes = Tile::kKeys * kDV * kElement, kOBytes = Tile::kRows * Tile::kOutputColumns * 2;
  static_assert(!kFp8 || (Tile::kKeys % 32 == 0 && kVBytes % 1024 == 0), "steps of products have 32 keys of 8 bits");
  static_assert(Tile::kOutputColumns % 64 == 0 && kDV % Tile::kOutputColumns == 0, "outputs leave in whole chunks");

  // Half of a tile's keys, in whole steps of the product with values.
  static constexpr int kHalfKeys = (Tile::kKeys / 2 + 32 / kElement - 1) / (32 / kElement) * (32 / kElement);

  // Shared memory, in this order; the first four start at multiples of 1024.
  static constexpr int kQueriesAt = 0, kKeysAt = Tile::kQueries * kQBytes;
  static constexpr int kValuesAt = kKeysAt + Tile::kStages * kKBytes;
  static constexpr int kRawStages = kFp8 ? Tile::kRawStages : 0, kRawAt = kValuesAt + Tile::kStages * kVBytes;
  static constexpr int kOutputAt = kRawAt + kRawStages * kVBytes, kWorkAt = kOutputAt + kOBytes;
  static constexpr int kWorkSlots = 4, kWorkBytes = kWorkSlots * static_cast<int>(sizeof(Work));
  using QueryRing = Ring<Tile::kQueries>;
  using KeyRing = Ring<Tile::kStages>;
  using WorkRing = Ring<kWorkSlots>;
  using RawRing = Ring<Tile::kRawStages>;
  // Of the warps that gather: rows of a tile that a third warp takes, about as many as the other two have left then;
  // and where the rows of a tile are.
  static constexpr int kHelpedRows = kFp8 ? 0 : (Tile::kKeys / 3 + 8) / 16 * 16;
  static constexpr int kTablesAt = kWorkAt + kWorkBytes, kTableBytes = Tile::kKeys * 8;
  static constexpr int kBarriersAt = kTablesAt + 2 * kTableBytes;
  static constexpr int kBarrierBytes =
      QueryRing::kBytes + 2 * KeyRing::kBytes + WorkRing::kBytes + 8 * Tile::kStages + RawRing::kBytes;
  static constexpr int kSharedBytes = kBarriersAt + kBarrierBytes + 1024;  // the start is rounded up

  using Outputs = ChunkedTile<64>;  // of a warpgroup
};

// The shape of a part of a tile, for what is computed in registers.
template <typename S, int kKeys_>
struct Part : S {
  static constexpr int kKeys = kKeys_, kNKeys = kKeys / 8;
};

// A block's shared memory: addresses of tiles and of barriers.
template <typename S>
struct Shared {
  uint32_t start;  // a multiple of 1024
  uint8_t* bytes;  // the same

  __device__ __forceinline__ explicit Shared(uint8_t* raw) {
    const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(raw));
    start = (at + 1023) & ~1023u, bytes = raw + (start - at);
  }

  __device__ __forceinline__ uint32_t queries(int use) const {
    return start + S::kQueriesAt + S::QueryRing::stage(use) * S::kQBytes;
  }
  __device__ __forceinline__ uint32_t keys(int use) const {
    return start + S::kKeysAt + S::KeyRing::stage(use) * S::kKBytes;
  }
  __device__ __forceinline__ uint32_t values(int use) const {
    return start + S::kValuesAt + S::KeyRing::stage(use) * S::kVBytes;
  }
  // Where the outputs of a warpgroup wait to be copied.
  __device__ __forceinline__ uint32_t output(int group) const {
    return start + S::kOutputAt + group * 64 * S::kOutputColumns * 2;
  }
  __device__ __forceinline__ Work& work(int use) const {
    return reinterpret_cast<Work*>(bytes + S::kWorkAt)[S::WorkRing::stage(use)];
  }

  __device__ __forceinline__ int64_t* table(int number) const {
    return reinterpret_cast<int64_t*>(bytes + S::kTablesAt + number * S::kTableBytes);
  }

  __device__ __forceinline__ typename S::QueryRing query_ring() const { return {start + S::kBarriersAt}; }
  __device__ __forceinline__ typename S::KeyRing key_ring() const {
    return {start + S::kBarriersAt + S::QueryRing::kBytes};
  }
  __device__ __forceinline__ typename S::KeyRing value_ring() const {
    return {key_ring().barriers + S::KeyRing::kBytes};
  }
  __device__ __forceinline__ typename S::WorkRing work_ring() const {
    return {value_ring().barriers + S::KeyRing::kBytes};
  }
  __device__ __forceinline__ typename S::RawRing raw_ring() const {
    return {work_ring().barriers + S::WorkRing::kBytes + 8 * S::kStages};
  }
  __device__ __forceinline__ uint32_t raw_values(int use) const {
    return start + S::kRawAt + S::RawRing::stage(use) * S::kVBytes;
  }
  // Of the stage of values whose rows behind the request's end are still to be cleared.
  __device__ __forceinline__ uint32_t uncleared(int use) const {
    return work_ring().barriers + S::WorkRing::kBytes + 8 * S::KeyRing::stage(use);
  }

  // By one thread, before __syncthreads(). `tile_arrivals` make a tile of keys or values full. Whoever reads a work
  // slot arrives: a lane of each warp that computes, and those of the three warps that load and clear.
  __device__ __forceinline__ void init(uint32_t tile_arrivals) const {
    constexpr int kWarps = 4 * S::kGroups;
    query_ring().init(1, kWarps);
    key_ring().init(tile_arrivals, kWarps);
    value_ring().init(S::kFp8 ? 1 : tile_arrivals, kWarps);
    raw_ring().init(tile_arrivals, 1);
    work_ring().init(1, kWarps + 3);
    for (int i = 0; i < S::kStages; ++i) ptx::mbarrier_init(uncleared(i), 1);
    ptx::mbarrier_fence_init();
  }
};

}  // namespace flashinfer::cuda::sm90
