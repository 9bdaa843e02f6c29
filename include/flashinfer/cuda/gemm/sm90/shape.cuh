// The Hopper kernels of grouped products: sizes of their tiles, and their shared memory.
//
// Rows of a matrix (weights) are the rows of a warpgroup's product, and rows of the output (tokens) are its columns: of
// those there may be any multiple of 16, so that a small group costs little more than its share.
#pragma once

#include <cstdint>
#include <type_traits>

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/gemm.h>
#include <flashinfer/cuda/ptx/wgmma.cuh>
#include <flashinfer/cuda/tile/descriptor.cuh>
#include <flashinfer/cuda/tile/ring.cuh>

namespace flashinfer::cuda::sm90 {

constexpr int kGemmStrip = 128;         // weights of a block, 64 of each of its two warpgroups
constexpr int kGemmThreads = 384;       // two warpgroups that compute, then one that loads
constexpr int kGemmStripsTogether = 8;  // tiles of tokens that a strip is kept in the L2 cache for
constexpr int kGemmBox = 64;            // tokens of one copy; there are others of half and of a quarter of them
constexpr int kStoreRows = 16;          // of the output that leave with one copy
constexpr int kPanel = 8, kPanels = 2;  // steps whose factors come together, and how many such are in shared memory

// For how many tokens of a group. The fewer a tile may have, the more of the weights are under way.
enum class GemmSize { kMany, kSome, kFew };

// kByDepth: of weights, numbers of the depth lie beside each other, else those of a step of it.
template <typename T_, bool kByDepth_, GemmSize kSize>
struct GemmShape {
  using T = T_;
  static constexpr bool kByDepth = kByDepth_;
  // Sums of 8 bits are added to others, with factors, after each step: both take registers.
  static constexpr bool kFp8 = sizeof(T) == 1, kFew = kSize == GemmSize::kFew;
  // Many tokens of 8 bits are rows of a product: a thread has two of each 64, and as many factors.
  static constexpr bool kTokensAreRows = kFp8 && kSize == GemmSize::kMany;
  static constexpr int kTokens = kFew ? 64 : kSize == GemmSize::kSome ? 160 : 256;
  static constexpr int kStages = kFew ? 8 : kTokens == 160 ? 5 : kTokensAreRows ? 3 : 4;
  static constexpr int kCluster = kFew ? 1 : 2;   // blocks with neighbouring strips, which share their tokens
  static constexpr int kDepth = 128 / sizeof(T);  // of a step: a line of 128 bytes of each row
  static constexpr auto kType = ptx::kWgmmaType<T>;
  static constexpr int kGatherThreads = 64;  // beside the warps for boxes and for factors
  static constexpr int kLoadRegisters = 56, kComputeRegisters = 224;
  using Out = std::conditional_t<kFp8, bfloat16_t, T>;       // what leaves in whole lines
  static constexpr bool kStores = kSize == GemmSize::kMany;  // by copies, while the next tile is computed
  static_assert(kByDepth || !kFp8, "products of 8 bits take numbers of the depth beside each other");

  static constexpr int kGroupBytes = 64 * 128;  // of a warpgroup's weights: as many numbers of the depth as weights
  static constexpr int kWeightBytes = 2 * kGroupBytes, kTokenBytes = kTokens * 128;
  static constexpr int kTokensAt = kWeightBytes, kStageBytes = kTokensAt + kTokenBytes;
  static constexpr int kOutRows = kFp8 ? 64 : 128;                              // 64 columns of a warpgroup
  static constexpr int kOutBytes = (kTokensAreRows ? 4 * 64 : kOutRows) * 128;  // all of it where tokens are rows
  static constexpr int kOutputsAt = kStages * kStageBytes, kFactorsAt = kOutputsAt + 2 * kOutBytes;
  // Of each step of a panel: those of tokens, of weights, and what puts those of the next step into other banks.
  static constexpr int kFactorPitch = (kTokens + (kTokensAreRows ? 4 : kGemmStrip + 4)) * 4,
                       kPanelBytes = kPanel * kFactorPitch;
  static constexpr int kFactorWarps = kTokensAreRows ? 2 : 1;
  static constexpr int kBytes = kFactorsAt + (kFp8 ? kPanels * kPanelBytes : 0);
  static constexpr int kSharedBytes = kBytes + 1024;  // what the start may be moved by
  static_assert(kStageBytes % 1024 == 0 && kSharedBytes + 16 * (kStages + kPanels) <= 232448,
                "whole patterns of the swizzle fit");
};

struct HopperSettings {
  int64_t a_stride, out_stride;  // from row to row, in elements
  int32_t strips;                // of clusters
  int32_t tokens;                // of a tile at most
  bool lines;                    // the output is written in lines of 16 bytes
  GemmGate gate;                 // of halves of b's rows
};

template <typename S>
struct GemmShared {
  uint32_t start, barriers;

  __device__ __forceinline__ uint32_t weights(int stage) const { return start + stage * S::kStageBytes; }
  __device__ __forceinline__ uint32_t tokens(int stage) const { return weights(stage) + S::kTokensAt; }
  // Of a panel's first step.
  __device__ __forceinline__ uint32_t factors(int panel) const {
    return start + S::kFactorsAt + panel * S::kPanelBytes;
  }
  __device__ __forceinline__ uint32_t outputs(int group) const { return start + S::kOutputsAt + group * S::kOutBytes; }
  __device__ __forceinline__ Ring<S::kStages> ring() const { return {barriers}; }
  __device__ __forceinline__ Ring<kPanels> panels() const { return {barriers + 16 * S::kStages}; }
};

}  // namespace flashinfer::cuda::sm90
