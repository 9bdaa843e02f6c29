// Tile of a CTA in grouped GEMM: sizes, shared memory and the tile scheduler.
#pragma once

#include <cstdint>
#include <type_traits>

#include <flashinfer/common/gemm.h>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/swizzle.cuh>

namespace flashinfer::cuda {

// Tile of kRows x kColumns with kDepth elements of k per step. 8-bit elements are half_t in smem, which has
// each exactly. kKMajor: elements of b are contiguous along k, else along columns. kScaled: each block of k
// has its own scale factors.
template <typename TA, typename TB, int kTileRows, bool kKMajor_, bool kScaled_>
struct GemmShape {
  using A = TA;
  using B = TB;
  static constexpr bool kKMajor = kKMajor_, kScaled = kScaled_, kFloat = __is_same(TA, float);
  using S = std::conditional_t<sizeof(TA) == 1, half_t, TA>;  // in shared memory
  static constexpr int kRows = kTileRows, kColumns = 128, kThreads = 256;
  static constexpr int kChunk = 16 / sizeof(S);  // elements of 16 bytes
  static constexpr int kDepth = (kRows <= 16 ? 256 : 128) / static_cast<int>(sizeof(S));
  static constexpr int kARowBytes = kDepth * sizeof(S), kBRowBytes = (kKMajor ? kDepth : kColumns) * sizeof(S);
  static constexpr int kAAt = 0, kBAt = kRows * kARowBytes;
  static constexpr int kFactorsAt = kBAt + kColumns * kDepth * sizeof(S);
  static constexpr int kStageBytes = kFactorsAt + kThreads * 4;  // factors of rows, then of columns
  static constexpr int kSharedBytes = 2 * kStageBytes + 128;
  static_assert(kRows <= 128 && kStageBytes % 128 == 0,
                "each factor has a thread, and stages start at multiples of 128");
  // Arrangement of the warps in rows and columns.
  static constexpr int kWarpsDown = kRows == 128 ? 2 : 1, kWarpsAcross = 8 / kWarpsDown;
  static constexpr int kWarpRows = kRows / kWarpsDown, kWarpColumns = kColumns / kWarpsAcross;
};

// Settings that are equal for all tiles.
struct GemmSettings {
  int32_t column_tiles;
  bool a_vectors, b_vectors, out_pairs;  // alignment allows loads of 16 bytes, and stores of two results
};

struct GemmTile {
  int64_t row, end, matrix;  // rows of the output up to the group's end
  int32_t column;
};

// Tile scheduler. Tiles are ordered by group, then by strip of columns, then by rows, so a strip of b is read
// from gmem once. Every warp runs its own scheduler, over 32 groups at a time.
template <int kTileRows, int kTileColumns>
class GemmTiles {
 public:
  __device__ __forceinline__ GemmTiles(const GemmParams& params, int32_t column_tiles)
      : p_(params), column_tiles_(column_tiles) {
    count();
  }

  // Find the tile of a number. Numbers must rise from call to call. Return false after the last tile.
  __device__ __forceinline__ bool find(int64_t number, GemmTile& tile) {
    while (number >= earlier_tiles_ + all_tiles_) {
      if (first_group_ + 32 >= p_.num_groups) return false;
      earlier_tiles_ += all_tiles_, first_group_ += 32;
      count();
    }
    const int owner = __ffs(__ballot_sync(~0u, number < earlier_tiles_ + inclusive_tiles_)) - 1;
    const int64_t begin = __shfl_sync(~0u, group_.begin, owner), end = __shfl_sync(~0u, group_.end, owner);
    const int64_t matrix = __shfl_sync(~0u, group_.matrix, owner), own = __shfl_sync(~0u, own_tiles_, owner);
    const int64_t rest = number - earlier_tiles_ - (__shfl_sync(~0u, inclusive_tiles_, owner) - own),
                  down = own / column_tiles_;
    const int64_t strip = rest / down;
    tile = {begin + (rest - strip * down) * kTileRows, end, matrix, static_cast<int32_t>(strip) * kTileColumns};
    return true;
  }

 private:
  __device__ __forceinline__ void count() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    group_ = first_group_ + lane < p_.num_groups ? p_.group(first_group_ + lane) : GemmGroup{0, 0, 0};
    own_tiles_ = (group_.end - group_.begin + kTileRows - 1) / kTileRows * column_tiles_;
    inclusive_tiles_ = own_tiles_;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t below = __shfl_up_sync(~0u, inclusive_tiles_, step);
      if (lane >= step) inclusive_tiles_ += below;
    }
    all_tiles_ = __shfl_sync(~0u, inclusive_tiles_, 31);
  }

  const GemmParams& p_;
  int32_t column_tiles_;
  int64_t first_group_ = 0, earlier_tiles_ = 0;  // first of the 32 groups, and number of tiles of the groups before it
  GemmGroup group_;                              // group of this lane
  int64_t own_tiles_, inclusive_tiles_,
      all_tiles_;  // tiles of this lane's group, of the groups up to it, and of all 32
};

}  // namespace flashinfer::cuda
