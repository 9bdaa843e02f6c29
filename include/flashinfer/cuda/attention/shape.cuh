// Compile-time shapes of the portable attention kernel: element types, head dimensions, the tile, and its
// shared memory.
//
// A CTA has kRowWarps * kKeyWarps warps. The kRowWarps warps of a group load the same keys and compute
// different rows. The kKeyWarps groups take tiles of keys in rotation, and the epilogue merges their partial
// states.
#pragma once

#include <cstdint>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/tile/convert.cuh>

namespace flashinfer::cuda {

template <typename Q, typename KV, typename O, int kHeadDimQK, int kHeadDimVO, PosEncodingMode kPosEncoding>
struct AttentionTypes {
  using DTypeQ = Q;
  using DTypeKV = KV;
  using DTypeO = O;
  static constexpr int HEAD_DIM_QK = kHeadDimQK, HEAD_DIM_VO = kHeadDimVO;
  static constexpr bool kRope = kPosEncoding == PosEncodingMode::kRopeLlama;
  static constexpr bool kFp8 = sizeof(KV) == 1;
  static constexpr int kKvBytes = (kHeadDimQK + kHeadDimVO) * sizeof(KV);
  static_assert(kHeadDimQK % (kRope ? 32 : 16) == 0 && kHeadDimVO % 16 == 0,
                "head dimensions are multiples of 16, or of 32 with RoPE");
  static_assert(sizeof(O) == 2, "outputs have 16 bits");
  static_assert(sizeof(Q) == 2 || __is_same(Q, KV), "queries have 16 bits or the type of keys");
};

// kMTiles: number of 16-row fragments per warp. kKeys: number of keys per tile. kMaxStages: number of stages,
// or fewer if kCtasPerSm CTAs with so many stages do not fit into the smem of an SM.
template <int kMTiles_, int kRowWarps_, int kKeyWarps_, int kKeys_, int kMaxStages_, int kCtasPerSm_>
struct AttentionTile {
  static constexpr int kMTiles = kMTiles_, kRowWarps = kRowWarps_, kKeyWarps = kKeyWarps_, kKeys = kKeys_;
  static constexpr int kMaxStages = kMaxStages_, kCtasPerSm = kCtasPerSm_;
  static constexpr int kRows = 16 * kMTiles * kRowWarps, kGroupThreads = 32 * kRowWarps;
  static constexpr int kThreads = kGroupThreads * kKeyWarps;
  static_assert(kRowWarps == 1 || kKeyWarps == 1, "a group is one warp or the whole CTA");
  static_assert(kKeys % 16 == 0 && kKeys <= kGroupThreads, "each key of a tile has a thread that looks up its row");
};

// Columns of O that fit into the registers of a warp with 16 rows.
constexpr int kMaxColumns = 256;

// Addresses of one key and of its value in gmem.
struct alignas(16) KvRow {
  const char *k, *v;
};

// Wide values need kVParts CTAs per item and KV head. Each computes the whole S, and kDV columns of O. These
// CTAs are adjacent, so the second one reads its keys from the L2 cache.
template <typename Types_, typename Tile_>
struct AttentionShape : Types_, Tile_ {
  using Types = Types_;
  using Tile = Tile_;
  using KV = typename Types::DTypeKV;
  static constexpr int kVParts = (Types::HEAD_DIM_VO + kMaxColumns - 1) / kMaxColumns;
  static constexpr int kDQ = Types::HEAD_DIM_QK, kDV = Types::HEAD_DIM_VO / kVParts, kM = Tile::kMTiles;
  static_assert(kDV % 16 == 0 && kDV * kVParts == Types::HEAD_DIM_VO, "parts are equal and consist of whole fragments");
  static constexpr int kNKeys = Tile::kKeys / 8, kNOut = kDV / 8, kSteps = kDQ / 16;  // fragments
  // Q stays in smem if the registers of a thread for Q, O and S would exceed 176.
  static constexpr bool kQueryInRegisters = !Types::kRope && kM * (kDQ / 4 + kDV / 2 + Tile::kKeys / 2) <= 176;
  static constexpr int kRotationParts = Types::kRope ? 2 : 1;            // h and g, see rotation.cuh
  static constexpr bool kFp8Keys = Types::kFp8 && !Types::kRope;         // the mma reads e4m3 keys from smem
  static constexpr bool kRotatesInPlace = Types::kRope && !Types::kFp8;  // h overwrites the copied keys

  // If warps share rotated keys, the next tile is rotated during the products of this one.
  static constexpr bool kRotatesAhead = Types::kRope && Tile::kRowWarps > 1;
  static constexpr int kMinStages = kRotatesAhead ? 3 : 2;
  static_assert(Tile::kMaxStages >= kMinStages,
                "one stage is computed, one is filled, and with RoPE a third is rotated");

  static constexpr int kQRowBytes = kDQ * 2, kKRowBytes = kDQ * sizeof(KV), kVRowBytes = kDV * sizeof(KV);
  static constexpr int kQPartBytes = Tile::kRows * kQRowBytes, kQBytes = kRotationParts * kQPartBytes;
  static constexpr int kKBytes = Tile::kKeys * kKRowBytes, kVBytes = Tile::kKeys * kVRowBytes;
  static constexpr int kStageBytes = kKBytes + kVBytes, kTableBytes = Tile::kKeys * sizeof(KvRow);
  static constexpr int kOperandRowBytes = Types::kRope ? 2 * kDQ : kKRowBytes;  // a key as the mma reads it
  static constexpr int kOperandBytes = Types::kRope ? Tile::kKeys * kOperandRowBytes : 0;
  static constexpr int kRotatedTileBytes = (kRotatesInPlace ? 1 : 2) * kOperandBytes,
                       kRotatedBytes = (kRotatesAhead ? 2 : 1) * kRotatedTileBytes;
  static constexpr int kFrequencyBytes = Types::kRope ? kDQ / 2 * 16 : 0;  // one RopeFrequency per pair
  static constexpr int kPartialStride = kDV + 4;  // floats of a row of O in the merge of groups
  static constexpr int kPartialBytes =
      Tile::kKeyWarps > 1 ? Tile::kKeyWarps * Tile::kRows * (kPartialStride + 2) * static_cast<int>(sizeof(float)) : 0;

  // Layout of smem: queries, frequencies, stages of all groups, rotated keys of all groups, tables of all
  // groups.
  FLASHINFER_HD static constexpr int shared_bytes(int stages) {
    const int used = table(Tile::kKeyWarps, stages);
    return used > kPartialBytes ? used : kPartialBytes;
  }
  FLASHINFER_HD static constexpr int ring(int group, int stages) {
    return kQBytes + kFrequencyBytes + group * stages * kStageBytes;
  }
  FLASHINFER_HD static constexpr int rotated(int group, int stages) {
    return ring(Tile::kKeyWarps, stages) + group * kRotatedBytes;
  }
  FLASHINFER_HD static constexpr int table(int group, int stages) {
    return rotated(Tile::kKeyWarps, stages) + group * stages * kTableBytes;
  }
};

// Return the first column of O, and of values, that this CTA computes.
template <typename S>
__device__ __forceinline__ int first_column() {
  if constexpr (S::kVParts > 1) {
    return static_cast<int>(blockIdx.x) % S::kVParts * S::kDV;
  } else {
    return 0;
  }
}

}  // namespace flashinfer::cuda
