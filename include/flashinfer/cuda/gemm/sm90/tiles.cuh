// Tile scheduler of a cluster, for groups whose sizes only the device knows.
#pragma once

#include <cstdint>

#include <flashinfer/common/gemm.h>
#include <flashinfer/cuda/gemm/sm90/shape.cuh>

namespace flashinfer::cuda::sm90 {

struct GemmTile {
  int32_t matrix;
  int32_t row, rows;  // of the output
  int32_t tokens;     // columns of wgmma: `rows` and padding
  int32_t strip;      // first strip of the cluster
};

// Return the columns of wgmma for this number of rows.
FLASHINFER_HD int32_t filled_up_tokens(int32_t rows) { return rows <= 16 ? 16 : (rows + 31) / 32 * 32; }

// Tiles of all groups in order. A group's rows are cut into as few tiles as possible, of about equal size.
// The strips of a cluster meet kGemmStripsTogether token tiles one after the other, so that concurrent
// clusters cover about a square. Every warp schedules for itself, 32 groups at a time.
template <typename S>
class GemmTiles {
 public:
  __device__ __forceinline__ GemmTiles(const GemmParams& params, const GemmSettings& settings)
      : p_(params), strips_(settings.strips), tokens_(settings.tokens) {
    count();
  }

  // Find the tile of a number that grows from call to call. Return false after the last tile.
  __device__ __forceinline__ bool find(int32_t number, GemmTile& tile) {
    while (number >= before_ + all_) {
      if (first_ + 32 >= static_cast<int32_t>(p_.num_groups)) return false;
      before_ += all_, first_ += 32;
      count();
    }
    const int owner = __ffs(__ballot_sync(~0u, number < before_ + upto_)) - 1;
    const int32_t begin = __shfl_sync(~0u, begin_, owner), rows = __shfl_sync(~0u, rows_, owner);
    const int32_t down = tiles_of(rows), upto = __shfl_sync(~0u, upto_, owner);
    const int32_t rest = number - before_ - (upto - down * strips_);
    // Token tiles in columns of kGemmStripsTogether.
    const int32_t column = kGemmStripsTogether * strips_, first = rest / column * kGemmStripsTogether;
    const int32_t within = rest % column;
    const int32_t height = down - first < kGemmStripsTogether ? down - first : kGemmStripsTogether;
    const int32_t each = share_of(rows, down), at = (first + within % height) * each;
    tile.matrix = __shfl_sync(~0u, matrix_, owner);
    tile.strip = within / height * S::kCluster;
    tile.row = begin + at;
    tile.rows = rows - at < each ? rows - at : each;
    tile.tokens = filled_up_tokens(tile.rows);
    return true;
  }

 private:
  // Return the rows of each of a group's `tiles` tiles. As rows of wgmma, every started 128 of them cost the
  // same.
  static __device__ __forceinline__ int32_t share_of(int32_t rows, int32_t tiles) {
    const int32_t share = (rows + tiles - 1) / tiles;
    return S::kTokensAreRows ? (share + 127) / 128 * 128 : filled_up_tokens(share);
  }
  __device__ __forceinline__ int32_t tiles_of(int32_t rows) const { return (rows + tokens_ - 1) / tokens_; }

  __device__ __forceinline__ void count() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const GemmGroup group = first_ + lane < p_.num_groups ? p_.group(first_ + lane) : GemmGroup{0, 0, 0};
    begin_ = static_cast<int32_t>(group.begin), rows_ = static_cast<int32_t>(group.end - group.begin);
    matrix_ = static_cast<int32_t>(group.matrix);
    upto_ = tiles_of(rows_) * strips_;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t below = __shfl_up_sync(~0u, upto_, step);
      if (lane >= step) upto_ += below;
    }
    all_ = __shfl_sync(~0u, upto_, 31);
  }

  const GemmParams& p_;
  int32_t strips_, tokens_;         // strips of clusters; tokens of a tile, at most
  int32_t first_ = 0, before_ = 0;  // first of the 32 groups, and number of earlier tiles
  int32_t begin_, rows_, matrix_;   // group of this lane
  int32_t upto_, all_;              // tiles up to it, its own tiles, tiles of all 32
};

}  // namespace flashinfer::cuda::sm90
