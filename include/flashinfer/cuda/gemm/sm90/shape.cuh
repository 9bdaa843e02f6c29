// Tile sizes and shared memory of grouped GEMM on Hopper.
//
// Rows of a matrix (weights) are the rows of wgmma, and rows of the output (tokens) are its columns. Their
// number is any multiple of 16, so a small group costs little more than its share.
#pragma once

#include <cstdint>
#include <type_traits>

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/gemm.h>
#include <flashinfer/cuda/ptx/wgmma.cuh>
#include <flashinfer/cuda/tile/descriptor.cuh>
#include <flashinfer/cuda/tile/ring.cuh>

namespace flashinfer::cuda::sm90 {

constexpr int kGemmStrip = 128;         // weights of a CTA, 64 of each of its two consumers
constexpr int kGemmThreads = 384;       // two consumer warpgroups, then a producer
constexpr int kGemmStripsTogether = 8;  // token tiles for which a strip stays in the L2 cache
constexpr int kGemmBox = 64;            // tokens of a copy; other copies have half and a quarter
constexpr int kStoreRows = 16;          // output rows of one TMA store
constexpr int kPanel = 8, kPanels = 2;  // steps of a panel of factors, and panels in shared memory

// Number of tokens of a group that the tile suits. The fewer tokens a tile may have, the more weights are in
// flight.
enum class GemmSize { kMany, kSome, kFew };

// kKMajor: weights are contiguous along k, else along rows of the matrix.
template <typename T_, bool kKMajor_, GemmSize kSize>
struct GemmShape {
  using T = T_;
  static constexpr bool kKMajor = kKMajor_;
  // After each step, 8-bit sums are scaled and added to others: both take registers.
  static constexpr bool kFp8 = sizeof(T) == 1, kFew = kSize == GemmSize::kFew;
  // Many 8-bit tokens are the rows of wgmma: a thread has two of each 64, and as many factors.
  static constexpr bool kTokensAreRows = kFp8 && kSize == GemmSize::kMany;
  static constexpr int kTokens = kFew ? 64 : kSize == GemmSize::kSome ? 160 : 256;
  static constexpr int kStages = kFew ? 8 : kTokens == 160 ? 5 : kTokensAreRows ? 3 : 4;
  static constexpr int kCluster = kFew ? 1 : 2;   // CTAs with adjacent strips, which share their tokens
  static constexpr int kDepth = 128 / sizeof(T);  // a step of k: a line of 128 bytes of each row
  static constexpr auto kType = ptx::kWgmmaType<T>;
  static constexpr int kGatherThreads = 64;  // in addition to the warps for boxes and factors
  static constexpr int kLoadRegisters = 56, kComputeRegisters = 224;
  using Out = std::conditional_t<kFp8, bfloat16_t, T>;       // type of the output in whole lines
  static constexpr bool kStores = kSize == GemmSize::kMany;  // by TMA, while the next tile is computed
  static_assert(kKMajor || !kFp8, "wgmma of 8-bit types reads adjacent elements along the depth");

  static constexpr int kGroupBytes = 64 * 128;  // weights of a warpgroup: as many elements of k as weights
  static constexpr int kWeightBytes = 2 * kGroupBytes, kTokenBytes = kTokens * 128;
  static constexpr int kTokensAt = kWeightBytes, kStageBytes = kTokensAt + kTokenBytes;
  static constexpr int kOutRows = kFp8 ? 64 : 128;                              // 64 columns of a warpgroup
  static constexpr int kOutBytes = (kTokensAreRows ? 4 * 64 : kOutRows) * 128;  // a whole tile if tokens are rows
  static constexpr int kOutputsAt = kStages * kStageBytes, kFactorsAt = kOutputsAt + 2 * kOutBytes;
  // A step of a panel: factors of tokens, of weights, and padding that shifts the next step to other banks.
  static constexpr int kFactorPitch = (kTokens + (kTokensAreRows ? 4 : kGemmStrip + 4)) * 4,
                       kPanelBytes = kPanel * kFactorPitch;
  static constexpr int kFactorWarps = kTokensAreRows ? 2 : 1;
  static constexpr int kBytes = kFactorsAt + (kFp8 ? kPanels * kPanelBytes : 0);
  static constexpr int kSharedBytes = kBytes + 1024;  // with room to align the start
  static_assert(kStageBytes % 1024 == 0 && kSharedBytes + 16 * (kStages + kPanels) <= 232448,
                "whole patterns of the swizzle fit");
};

struct GemmSettings {
  int64_t a_stride, out_stride;  // distance of rows, in elements
  int32_t strips;                // strips of clusters
  int32_t tokens;                // tokens of a tile, at most
  bool lines;                    // the output is stored in lines of 16 bytes
  GemmGate gate;                 // halves of b's rows
};

template <typename S>
struct GemmShared {
  uint32_t start, barriers;

  __device__ __forceinline__ uint32_t weights(int stage) const { return start + stage * S::kStageBytes; }
  __device__ __forceinline__ uint32_t tokens(int stage) const { return weights(stage) + S::kTokensAt; }
  // Return the first step of a panel.
  __device__ __forceinline__ uint32_t factors(int panel) const {
    return start + S::kFactorsAt + panel * S::kPanelBytes;
  }
  __device__ __forceinline__ uint32_t outputs(int group) const { return start + S::kOutputsAt + group * S::kOutBytes; }
  __device__ __forceinline__ Ring<S::kStages> ring() const { return {barriers}; }
  __device__ __forceinline__ Ring<kPanels> panels() const { return {barriers + 16 * S::kStages}; }
};

}  // namespace flashinfer::cuda::sm90
