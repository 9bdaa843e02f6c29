// Tile of a CTA in grouped GEMM: sizes, shared memory and the tile scheduler.
#pragma once

#include <cstdint>
#include <type_traits>

#include <flashinfer/common/gemm.h>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/swizzle.cuh>

namespace flashinfer::cuda {

// Sizes in rows, columns and a step of k. 8-bit elements are half_t in shared memory, where each is exact.
// kByDepth: elements of b are contiguous along k, else along columns. kScaled: blocks of k have factors.
template <typename TA, typename TB, int kTileRows, bool kByDepth_, bool kScaled_>
struct GemmShape {
  using A = TA;
  using B = TB;
  static constexpr bool kByDepth = kByDepth_, kScaled = kScaled_, kFloat = __is_same(TA, float);
  using S = std::conditional_t<sizeof(TA) == 1, half_t, TA>;  // in shared memory
  static constexpr int kRows = kTileRows, kColumns = 128, kThreads = 256;
  static constexpr int kChunk = 16 / sizeof(S);  // elements of 16 bytes
  static constexpr int kDepth = (kRows <= 16 ? 256 : 128) / static_cast<int>(sizeof(S));
  static constexpr int kLeftBytes = kDepth * sizeof(S), kRightBytes = (kByDepth ? kDepth : kColumns) * sizeof(S);
  static constexpr int kLeftAt = 0, kRightAt = kRows * kLeftBytes;
  static constexpr int kFactorsAt = kRightAt + kColumns * kDepth * sizeof(S);
  static constexpr int kStageBytes = kFactorsAt + kThreads * 4;  // factors of rows, then of columns
  static constexpr int kSharedBytes = 2 * kStageBytes + 128;
  static_assert(kRows <= 128 && kStageBytes % 128 == 0, "a thread for each factor, stages at multiples of 128");
  // Arrangement of the warps in rows and columns.
  static constexpr int kWarpsDown = kRows == 128 ? 2 : 1, kWarpsAcross = 8 / kWarpsDown;
  static constexpr int kWarpRows = kRows / kWarpsDown, kWarpColumns = kColumns / kWarpsAcross;
};

// Settings that are equal for all tiles.
struct GemmSettings {
  int32_t column_tiles;
  bool a_vectors, b_vectors, out_pairs;  // alignment allows accesses of 16 bytes, or of two results
};

struct GemmTile {
  int64_t row, end, matrix;  // rows of the output up to the group's end
  int32_t column;
};

// Tile scheduler. Tiles are ordered by group, then by strip of columns, then by rows, so that memory delivers
// a strip once. Every warp schedules for itself, 32 groups at a time.
template <int kTileRows, int kTileColumns>
class GemmTiles {
 public:
  __device__ __forceinline__ GemmTiles(const GemmParams& params, int32_t column_tiles)
      : p_(params), column_tiles_(column_tiles) {
    count();
  }

  // Find the tile of a number that grows from call to call. Return false after the last tile.
  __device__ __forceinline__ bool find(int64_t number, GemmTile& tile) {
    while (number >= before_ + all_) {
      if (first_ + 32 >= p_.num_groups) return false;
      before_ += all_, first_ += 32;
      count();
    }
    const int owner = __ffs(__ballot_sync(~0u, number < before_ + upto_)) - 1;
    const int64_t begin = __shfl_sync(~0u, group_.begin, owner), end = __shfl_sync(~0u, group_.end, owner);
    const int64_t matrix = __shfl_sync(~0u, group_.matrix, owner), own = __shfl_sync(~0u, own_, owner);
    const int64_t rest = number - before_ - (__shfl_sync(~0u, upto_, owner) - own), down = own / column_tiles_;
    const int64_t strip = rest / down;
    tile = {begin + (rest - strip * down) * kTileRows, end, matrix, static_cast<int32_t>(strip) * kTileColumns};
    return true;
  }

 private:
  __device__ __forceinline__ void count() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    group_ = first_ + lane < p_.num_groups ? p_.group(first_ + lane) : GemmGroup{0, 0, 0};
    own_ = (group_.end - group_.begin + kTileRows - 1) / kTileRows * column_tiles_;
    upto_ = own_;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t below = __shfl_up_sync(~0u, upto_, step);
      if (lane >= step) upto_ += below;
    }
    all_ = __shfl_sync(~0u, upto_, 31);
  }

  const GemmParams& p_;
  int32_t column_tiles_;
  int64_t first_ = 0, before_ = 0;  // first of the 32 groups, and number of earlier tiles
  GemmGroup group_;                 // group of this lane
  int64_t own_, upto_, all_;        // tiles of this lane's group, up to it, and of all 32
};

}  // namespace flashinfer::cuda
