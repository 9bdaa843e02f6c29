// Compile-time shapes of the portable attention kernel: element types, head dimensions, the tile, and its
// shared memory.
//
// A CTA has kRowWarps * kKeyWarps warps. The warps of one key group share the keys that they load, and have
// different rows. Groups take tiles of keys in rotation, and their partial states are merged at the end.
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
  static constexpr int kBytesOfKey = (kHeadDimQK + kHeadDimVO) * sizeof(KV);
  static_assert(kHeadDimQK % (kRope ? 32 : 16) == 0 && kHeadDimVO % 16 == 0,
                "fragments are 16 elements wide, rotations two of them");
  static_assert(sizeof(O) == 2, "outputs have 16 bits");
  static_assert(sizeof(Q) == 2 || __is_same(Q, KV), "queries have 16 bits, or the type of keys");
};

// kMTiles: fragments of 16 rows of a warp. kKeys: keys of one tile of a group. kMaxStages: stages if shared
// memory has room for kCtasPerSm CTAs per multiprocessor.
template <int kMTiles_, int kRowWarps_, int kKeyWarps_, int kKeys_, int kMaxStages_, int kCtasPerSm_>
struct AttentionTile {
  static constexpr int kMTiles = kMTiles_, kRowWarps = kRowWarps_, kKeyWarps = kKeyWarps_, kKeys = kKeys_;
  static constexpr int kMaxStages = kMaxStages_, kCtasPerSm = kCtasPerSm_;
  static constexpr int kRows = 16 * kMTiles * kRowWarps, kGroupThreads = 32 * kRowWarps;
  static constexpr int kThreads = kGroupThreads * kKeyWarps;
  static_assert(kRowWarps == 1 || kKeyWarps == 1, "a group is a warp, or the block");
  static_assert(kKeys % 16 == 0 && kKeys <= kGroupThreads, "a thread finds one key's row");
};

// More columns of O than this do not fit into the registers of a warp with 16 rows.
constexpr int kMaxColumns = 256;

// The addresses of a key and its value.
struct alignas(16) KeyRow {
  const char *k, *v;
};

// Wide values have kVParts CTAs per item and KV head. Each computes S of all elements, and kDV columns of O. These CTAs
// are adjacent, so that the second one reads keys from the L2 cache.
template <typename Types_, typename Tile_>
struct AttentionShape : Types_, Tile_ {
  using Types = Types_;
  using Tile = Tile_;
  using KV = typename Types::DTypeKV;
  static constexpr int kVParts = (Types::HEAD_DIM_VO + kMaxColumns - 1) / kMaxColumns;
  static constexpr int kDQ = Types::HEAD_DIM_QK, kDV = Types::HEAD_DIM_VO / kVParts, kM = Tile::kMTiles;
  static_assert(kDV % 16 == 0 && kDV * kVParts == Types::HEAD_DIM_VO, "parts are equal, and made of whole fragments");
  static constexpr int kNKeys = Tile::kKeys / 8, kNOut = kDV / 8, kSteps = kDQ / 16;  // fragments
  // A thread's registers for O, S and Q. Q stays in shared memory if they are too many.
  static constexpr bool kQueryInRegisters = !Types::kRope && kM * (kDQ / 4 + kDV / 2 + Tile::kKeys / 2) <= 176;
  static constexpr int kParts = Types::kRope ? 2 : 1;             // h and g of rotation.cuh
  static constexpr bool kFp8Keys = Types::kFp8 && !Types::kRope;  // as products read them
  static constexpr bool kInPlace = Types::kRope && !Types::kFp8;  // the first part of rotated keys overwrites the keys

  // If warps share rotated keys, the next tile is rotated during the products of this one.
  static constexpr bool kRotatesAhead = Types::kRope && Tile::kRowWarps > 1;
  static constexpr int kMinStages = kRotatesAhead ? 3 : 2;
  static_assert(Tile::kMaxStages >= kMinStages, "one stage is computed, one is filled, and a third is rotated");

  static constexpr int kQRow = kDQ * 2, kKRow = kDQ * sizeof(KV), kVRow = kDV * sizeof(KV);
  static constexpr int kQPart = Tile::kRows * kQRow, kQBytes = kParts * kQPart;
  static constexpr int kKBytes = Tile::kKeys * kKRow, kVBytes = Tile::kKeys * kVRow;
  static constexpr int kStageBytes = kKBytes + kVBytes, kTableBytes = Tile::kKeys * sizeof(KeyRow);
  static constexpr int kKeyRow = Types::kRope ? 2 * kDQ : kKRow;  // as products read it
  static constexpr int kKeyPart = Types::kRope ? Tile::kKeys * kKeyRow : 0;
  static constexpr int kRotatedTile = (kInPlace ? 1 : 2) * kKeyPart,
                       kRotatedBytes = (kRotatesAhead ? 2 : 1) * kRotatedTile;
  static constexpr int kFrequencyBytes = Types::kRope ? kDQ / 2 * 16 : 0;  // a RopeFrequency each
  static constexpr int kSumStride = kDV + 4;                               // floats of a row in the merge of groups
  static constexpr int kSumsBytes =
      Tile::kKeyWarps > 1 ? Tile::kKeyWarps * Tile::kRows * (kSumStride + 2) * static_cast<int>(sizeof(float)) : 0;

  // Shared memory: queries, frequencies, then per group its stages, its rotated keys, and its table of rows.
  FLASHINFER_HD static constexpr int shared_bytes(int stages) {
    const int used = table(Tile::kKeyWarps, stages);
    return used > kSumsBytes ? used : kSumsBytes;
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

// Returns the first column of O, and of values, that this CTA computes.
template <typename S>
__device__ __forceinline__ int first_column() {
  if constexpr (S::kVParts > 1) {
    return static_cast<int>(blockIdx.x) % S::kVParts * S::kDV;
  } else {
    return 0;
  }
}

}  // namespace flashinfer::cuda
