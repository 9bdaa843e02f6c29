// Shapes of blocks that walk from chunk to chunk, and what they have in shared memory.
#pragma once

#include <type_traits>

#include <flashinfer/cuda/delta_rule/chunk/products.cuh>

namespace flashinfer::cuda {

// Of a block: kWarps warps compute, kLoaders more start copies; none of them: all do. More than 128 keys are two parts,
// each with half of the warps: every one has 16 columns of a state and the keys of its part. kChannels: each channel of
// k has a gate.
template <typename T_, int kKeys_, int kWarps_, int kLoaders_, bool kChannels_ = false>
struct DeltaWarpShape {
  using T = T_;
  static constexpr bool kChannels = kChannels_;
  static constexpr int kParts = kKeys_ > 128 ? 2 : 1, kPartKeys = kKeys_ / kParts, kPartWarps = kWarps_ / kParts;
  static constexpr int kPartTokens = 16;  // tokens of which parts add their sums at a time
  using Products = DeltaWarpProducts<T, kPartKeys>;
  using Terms = DeltaScanTerms;
  using ChunkTerms = std::conditional_t<kChannels, DeltaChannelTerms<kKeys_>, DeltaTerms>;  // of a chunk and value head
  using TermsOfZ = Terms;                                                                   // where P is not wanted
  static constexpr bool kHopper = false;
  static constexpr int kAlign = 128;  // of a tile
  static constexpr int kKeys = kKeys_, kWarps = kWarps_, kLoaders = kLoaders_, kColumns = 16 * kPartWarps;
  static constexpr int kThreads = 32 * (kWarps + kLoaders), kCopiers = kLoaders ? 32 * kLoaders : kThreads;
  static constexpr int kKeyBytes = 2 * kPartKeys, kValueBytes = 2 * kColumns;
  static constexpr int kBlocks = 1, kMostStages = kLoaders ? 3 : 2;  // blocks of an SM; see kWalkStages
  static constexpr int kMostBytes = 163 * 1024;                      // of shared memory, in 8.0
  using Keys = typename Products::Keys;                              // a chunk's rows of q or k, of a part's keys
  using KeyTiles = std::conditional_t<(kParts > 1), Keys[2], Keys>;
  using Values = uint4[kDeltaChunk][kValueBytes / 16];  // and of v or o, the columns of the block
};

// kGroups warpgroups compute, and one more starts copies.
template <typename T, int kKeys_, int kGroups, bool kChannels_ = false>
struct DeltaWarpgroupShape : DeltaWarpShape<T, kKeys_, 4 * kGroups, 4, kChannels_> {
  using Base = DeltaWarpShape<T, kKeys_, 4 * kGroups, 4, kChannels_>;
  using Products = DeltaWarpgroupProducts<T, Base::kPartKeys>;
  static constexpr int kPartTokens = kDeltaChunk;
  using Terms = DeltaTileTerms<DeltaTileMatrices>;
  using TermsOfZ = DeltaTileTerms<DeltaTileOfZ>;
  static constexpr bool kHopper = true;
  static constexpr int kAlign = 1024;
  static constexpr int kBlocks = kKeys_ <= 64 && kGroups == 1 ? 2 : 1, kMostStages = 3;
  // A processor of 9.0 has 228 KiB, of which a block takes one for itself and one for the barriers before its stages.
  static constexpr int kMostBytes = (228 / kBlocks - 2) * 1024;
  // None: a thread of this block can have as many as there are.
  static constexpr int kLoadRegisters = 56, kComputeRegisters = kGroups == 2 ? 224 : kBlocks == 2 ? 200 : 0;
};

// How many chunks have tiles at once, as many as there is memory for: one is computed while the others are on their
// way. Behind them is what a stage says that its walk keeps besides.
template <typename Shape, typename Stage>
constexpr int kMostScanStages = (Shape::kMostBytes - Stage::kTailBytes) / static_cast<int>(sizeof(Stage));
template <typename Shape, typename Stage>
constexpr int kScanStages =
    kMostScanStages<Shape, Stage> < Shape::kMostStages ? kMostScanStages<Shape, Stage> : Shape::kMostStages;
template <typename Shape, typename Stage>
constexpr int kScanBytes = kScanStages<Shape, Stage> * static_cast<int>(sizeof(Stage)) + Stage::kTailBytes;

// Sums of which each part of a state's keys has some: of kJoined tokens, 16 bytes of each lane.
template <typename Shape>
using DeltaPartSums = DeltaBlocks[Shape::kWarps][Shape::kPartTokens / 8];

// Rows of k that read a state, and those that are written into it: they are the same but for factors where all channels
// have one gate.
template <typename Shape, bool kChannels>
struct DeltaKeyRows {
  alignas(Shape::kAlign) typename Shape::KeyTiles k;

  __device__ __forceinline__ const typename Shape::KeyTiles& written() const { return k; }
};
template <typename Shape>
struct DeltaKeyRows<Shape, true> {
  alignas(Shape::kAlign) typename Shape::Keys k;
  alignas(Shape::kAlign) typename Shape::Keys written_k;
  alignas(16) float decay[Shape::kKeys];

  __device__ __forceinline__ const typename Shape::Keys& written() const { return written_k; }
};

}  // namespace flashinfer::cuda
