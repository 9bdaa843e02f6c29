// Shapes of CTAs that scan chunks, and their shared memory.
#pragma once

#include <type_traits>

#include <flashinfer/cuda/delta_rule/chunk/products.cuh>

namespace flashinfer::cuda {

// CTA with mma.sync. kWarps warps compute, and kLoaders other warps issue copies. With kLoaders = 0, the
// computing warps issue the copies. A key dimension of more than 128 is split into two parts, with half of
// the warps each. A warp has 16 columns of the state and the keys of its part. kChannels: each channel of k
// has its own decay.
template <typename T_, int kKeys_, int kWarps_, int kLoaders_, bool kChannels_ = false>
struct DeltaWarpShape {
  using T = T_;
  static constexpr bool kChannels = kChannels_;
  static constexpr int kParts = kKeys_ > 128 ? 2 : 1, kPartKeys = kKeys_ / kParts, kPartWarps = kWarps_ / kParts;
  static constexpr int kPartTokens = 16;  // tokens per exchange of sums between key parts
  using Products = DeltaWarpProducts<T, kPartKeys>;
  using Terms = DeltaScanTerms;
  using ChunkTerms = std::conditional_t<kChannels, DeltaChannelTerms<kKeys_>, DeltaTerms>;  // of a chunk and value head
  using TermsWithoutP = Terms;
  static constexpr bool kWgmma = false;
  static constexpr int kAlign = 128;  // of a tile
  static constexpr int kKeys = kKeys_, kWarps = kWarps_, kLoaders = kLoaders_, kColumns = 16 * kPartWarps;
  static constexpr int kThreads = 32 * (kWarps + kLoaders), kCopiers = kLoaders ? 32 * kLoaders : kThreads;
  static constexpr int kKeyBytes = 2 * kPartKeys, kValueBytes = 2 * kColumns;
  static constexpr int kCtasPerSm = 1, kMaxStages = kLoaders ? 3 : 2;  // CTAs per SM; see kScanStages
  static constexpr int kMaxBytes = 163 * 1024;                         // of smem, on 8.0
  using Keys = typename Products::Keys;                                // rows of q or k of a chunk, keys of one part
  using KeyTiles = std::conditional_t<(kParts > 1), Keys[2], Keys>;
  using Values = uint4[kDeltaChunk][kValueBytes / 16];  // rows of v or o, columns of the CTA
};

// CTA with wgmma: kGroups consumer warpgroups and one producer warpgroup.
template <typename T, int kKeys_, int kGroups, bool kChannels_ = false>
struct DeltaWarpgroupShape : DeltaWarpShape<T, kKeys_, 4 * kGroups, 4, kChannels_> {
  using Base = DeltaWarpShape<T, kKeys_, 4 * kGroups, 4, kChannels_>;
  using Products = DeltaWarpgroupProducts<T, Base::kPartKeys>;
  static constexpr int kPartTokens = kDeltaChunk;
  using Terms = DeltaTileTerms<DeltaTileMatrices>;
  using TermsWithoutP = DeltaTileTerms<DeltaTileZ>;
  static constexpr bool kWgmma = true;
  static constexpr int kAlign = 1024;
  static constexpr int kCtasPerSm = kKeys_ <= 64 && kGroups == 1 ? 2 : 1, kMaxStages = 3;
  // An SM of 9.0 has 228 KiB. The driver reserves one KiB per CTA, and barriers before the stages take
  // another.
  static constexpr int kMaxBytes = (228 / kCtasPerSm - 2) * 1024;
  // 0: no setmaxnreg, because the register file holds the maximum for all threads.
  static constexpr int kLoadRegisters = 56, kComputeRegisters = kGroups == 2 ? 224 : kCtasPerSm == 2 ? 200 : 0;
};

// Number of stages: as many as fit, at most kMaxStages. One is computed while copies fill the others.
// kTailBytes bytes of other data follow the stages.
template <typename Shape, typename Stage>
constexpr int kMaxScanStages = (Shape::kMaxBytes - Stage::kTailBytes) / static_cast<int>(sizeof(Stage));
template <typename Shape, typename Stage>
constexpr int kScanStages =
    kMaxScanStages<Shape, Stage> < Shape::kMaxStages ? kMaxScanStages<Shape, Stage> : Shape::kMaxStages;
template <typename Shape, typename Stage>
constexpr int kScanBytes = kScanStages<Shape, Stage> * static_cast<int>(sizeof(Stage)) + Stage::kTailBytes;

// Exchange buffer of sums over key parts: kPartTokens tokens, 16 bytes per lane.
template <typename Shape>
using DeltaPartSums = DeltaBlock16[Shape::kWarps][Shape::kPartTokens / 8];

// Rows of k for the product K S, and rows for the update of S. With one decay for all channels both are k,
// because the decay is a factor per token. With a decay per channel they differ.
template <typename Shape, bool kChannels>
struct DeltaKeyRows {
  alignas(Shape::kAlign) typename Shape::KeyTiles k;

  __device__ __forceinline__ const typename Shape::KeyTiles& update_rows() const { return k; }
};
template <typename Shape>
struct DeltaKeyRows<Shape, true> {
  alignas(Shape::kAlign) typename Shape::Keys k;
  alignas(Shape::kAlign) typename Shape::Keys update_k;
  alignas(16) float decay[Shape::kKeys];

  __device__ __forceinline__ const typename Shape::Keys& update_rows() const { return update_k; }
};

}  // namespace flashinfer::cuda
