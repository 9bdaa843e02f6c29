// Compile-time shapes of the Hopper attention kernel, and its shared memory.
//
// A CTA has kConsumers consumer warpgroups with 64 rows of Q each, and one producer warpgroup. All consumers
// use the same tiles of keys. CTAs are persistent and take one work item after the other.
#pragma once

#include <cstdint>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/tile/descriptor.cuh>
#include <flashinfer/cuda/tile/ring.cuh>

namespace flashinfer::cuda::sm90 {

constexpr int kPageKeys = 16;  // keys of one copy from a paged cache

// The configuration of a tile. A kernel's configuration derives from it and adds
//   kKeys           keys of a tile
//   kStages         stages of keys, and as many of values
//   kQueryStages    tiles of queries in shared memory
//   kOutputColumns  columns of the outputs that are staged together
// kRawStages: stages of 8-bit values between their copy and their transposition.
template <int kConsumers_>
struct TileConfig {
  static constexpr int kConsumers = kConsumers_, kRawStages = 1, kProducerRegisters = kConsumers == 2 ? 40 : 32;
};

template <typename Config>
struct Tile : Config {
  using Config::kConsumers, Config::kKeys, Config::kProducerRegisters;
  static constexpr int kRows = 64 * kConsumers, kConsumerThreads = 128 * kConsumers;
  static constexpr int kThreads = kConsumerThreads + 128;
  // ptxas gives each thread 168 registers with two consumers and 128 with three: 504 or 512 over the
  // warpgroups. The producer keeps kProducerRegisters, and the consumers share the rest.
  static constexpr int kConsumerRegisters = ((kConsumers == 2 ? 504 : 512) - kProducerRegisters) / kConsumers;
  static_assert(kProducerRegisters % 8 == 0 && kConsumerRegisters % 8 == 0, "setmaxnreg takes multiples of 8");
  static_assert(kConsumers == 2 || kConsumers == 3, "a CTA has two or three consumer warpgroups");
  static_assert(kKeys % 16 == 0, "a copy has 16 keys of a page");
};

// A work item in the ring of work, with values that the CTA's warps share.
struct alignas(32) Work : WorkItem {
  int32_t head;       // KV head
  int32_t tiles;      // tiles of keys; -1: no more work
  int32_t first_key;  // first key of the first tile, at most kv_start
  int32_t kv_begin;   // first entry of the request in the page table, or its first row of ragged keys
};

template <typename Types_, typename Tile_>
struct Shape : Types_, Tile_ {
  using Types = Types_;
  using Tile = Tile_;
  static constexpr int kDQ = Types::HEAD_DIM_QK, kDV = Types::HEAD_DIM_VO;
  static_assert(kDQ % 64 == 0 && kDV % 64 == 0 && kDQ >= kDV, "head dimensions are whole chunks of 64 elements");
  static_assert(sizeof(typename Types::DTypeQ) == sizeof(typename Types::DTypeKV) && !Types::kRope,
                "keys have the type of queries, and no RoPE");
  // wgmma reads 8-bit operands K-major only. A warp therefore transposes tiles of V, so that keys are
  // contiguous.
  static constexpr bool kFp8 = Types::kFp8;
  static_assert(!kFp8 || kDQ == kDV, "8-bit values have the head_dim of keys");
  static constexpr int kElementBytes = kFp8 ? 1 : 2;  // of q, k and v

  // Constants for code shared with the portable kernel. Fragments have 16 rows and 8 columns.
  static constexpr int kVParts = 1, kM = 1, kRowWarps = 4 * Tile::kConsumers, kNKeys = Tile::kKeys / 8, kNOut = kDV / 8;

  static constexpr int kChunkRowBytes =
      kDQ * kElementBytes % 128 == 0 && kDV * kElementBytes % 128 == 0 ? 128 : 64;  // swizzle width
  using Queries = ChunkedTile<Tile::kRows, kChunkRowBytes>;
  using Keys = ChunkedTile<Tile::kKeys, kChunkRowBytes>;  // keys, and values before the transposition
  using Transposed = ChunkedTile<kDV, Tile::kKeys % 128 == 0 ? 128 : Tile::kKeys % 64 == 0 ? 64 : 32>;
  static constexpr int kChunkElements = kChunkRowBytes / kElementBytes;
  static constexpr int kChunksQ = kDQ / kChunkElements, kChunksV = kDV / kChunkElements;
  static constexpr int kPRegisters = Tile::kKeys * kElementBytes / 8;  // registers of a thread for P of a tile
  static constexpr int kQBytes = Tile::kRows * kDQ * kElementBytes, kKBytes = Tile::kKeys * kDQ * kElementBytes;
  static constexpr int kVBytes = Tile::kKeys * kDV * kElementBytes, kOBytes = Tile::kRows * Tile::kOutputColumns * 2;
  static_assert(!kFp8 || (Tile::kKeys % 32 == 0 && kVBytes % 1024 == 0), "an 8-bit wgmma multiplies 32 keys");
  static_assert(Tile::kOutputColumns % 64 == 0 && kDV % Tile::kOutputColumns == 0,
                "O is stored in chunks of 64 columns");

  // Half of a tile's keys, rounded up to whole steps of P V.
  static constexpr int kHalfKeys =
      (Tile::kKeys / 2 + 32 / kElementBytes - 1) / (32 / kElementBytes) * (32 / kElementBytes);

  // Layout of smem. The tiles of Q, K, V and O start at multiples of 1024 bytes.
  static constexpr int kQueriesAt = 0, kKeysAt = Tile::kQueryStages * kQBytes;
  static constexpr int kValuesAt = kKeysAt + Tile::kStages * kKBytes;
  static constexpr int kRawStages = kFp8 ? Tile::kRawStages : 0, kRawAt = kValuesAt + Tile::kStages * kVBytes;
  static constexpr int kOutputAt = kRawAt + kRawStages * kVBytes, kWorkAt = kOutputAt + kOBytes;
  static constexpr int kWorkSlots = 4, kWorkBytes = kWorkSlots * static_cast<int>(sizeof(Work));
  using QueryRing = Ring<Tile::kQueryStages>;
  using KeyRing = Ring<Tile::kStages>;
  using WorkRing = Ring<kWorkSlots>;
  using RawRing = Ring<Tile::kRawStages>;
  // If rows are gathered, the third producer warp copies about a third of the rows of each tile. The tables
  // have the byte offset of each row of a tile, one for keys and one for values.
  static constexpr int kThirdWarpRows = kFp8 ? 0 : (Tile::kKeys / 3 + 8) / 16 * 16;
  static constexpr int kTablesAt = kWorkAt + kWorkBytes, kTableBytes = Tile::kKeys * 8;
  static constexpr int kBarriersAt = kTablesAt + 2 * kTableBytes;
  static constexpr int kBarrierBytes =
      QueryRing::kBytes + 2 * KeyRing::kBytes + WorkRing::kBytes + 8 * Tile::kStages + RawRing::kBytes;
  static constexpr int kSharedBytes =
      kBarriersAt + kBarrierBytes + 1024;  // the start is rounded up to a multiple of 1024

  using Outputs = ChunkedTile<64>;  // of a warpgroup
};

// Shape of S over the first kKeys_ keys of a tile.
template <typename S, int kKeys_>
struct FirstKeys : S {
  static constexpr int kKeys = kKeys_, kNKeys = kKeys / 8;
};

// A CTA's shared memory: addresses of tiles and of barriers.
template <typename S>
struct Shared {
  uint32_t start;  // a multiple of 1024
  uint8_t* bytes;  // the same address as a pointer

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
  // Return the staging buffer of a warpgroup's outputs.
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
  // Return the barrier on which the copy of a stage of values completes if rows after the request's end must
  // be cleared before the stage is full.
  __device__ __forceinline__ uint32_t uncleared(int use) const {
    return work_ring().barriers + S::WorkRing::kBytes + 8 * S::KeyRing::stage(use);
  }

  // Runs in one thread, before __syncthreads(). A tile of keys or values is full after `tile_arrivals`
  // arrivals. A work slot is empty after one lane of each consumer warp and of the three producer warps has
  // arrived.
  __device__ __forceinline__ void init(uint32_t tile_arrivals) const {
    constexpr int kWarps = 4 * S::kConsumers;
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
