// Epilogue of the gradient kernel: the stores of dq and dk of a chunk and head of q and k, and of dg, dbeta and
// dV of a value head.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/backward/grid.cuh>
#include <flashinfer/cuda/delta_rule/chunk/backward/products.cuh>
#include <flashinfer/cuda/delta_rule/columns.cuh>

namespace flashinfer::cuda {

template <typename Shape>
struct DeltaGradientOutput : Shape::Products {
  using T = typename Shape::T;
  using Products = typename Shape::Products;
  using Rows = typename Products::Rows;
  using Sums = typename Products::Sums::Keys;
  using Cursor = GradientCursor;
  static constexpr int kKeys = Shape::kKeys, kThreads = Shape::kThreads;
  using KeyRows = Swizzle<2 * kKeys, kDeltaChunk>;
  using Products::half, Products::lane, Products::row, Products::rows, Products::thread;

  const DeltaRuleBackwardParams& p;
  const DeltaRuleInputs& in;
  const GradientGrid& grid;

  __device__ __forceinline__ DeltaGradientOutput(const DeltaRuleBackwardParams& params, const GradientGrid& grid_)
      : p(params), in(params.in), grid(grid_) {}

  // Return the index of the key part, 0 without parts.
  __device__ __forceinline__ static int part(const Cursor& at) { return Shape::kParts > 1 ? at.part : 0; }

  __device__ __forceinline__ float2 pair_of(const Rows& tile, int n, int lower) const {
    float2 two;
    unpack<T>(ptx::load_shared(pair_address(tile, n, lower)), two.x, two.y);
    return two;
  }
  // Return the dot products of the rows of tile and sum, over this warp's keys.
  __device__ __forceinline__ float2 row_dot(const Rows& tile, const Sums& sums) const {
    float2 total = make_float2(0.f, 0.f);
#pragma unroll
    for (int n = 0; n < Sums::kN; ++n) {
      const float2 upper = pair_of(tile, n, 0), lower = pair_of(tile, n, 1);
      total.x += upper.x * sums[0][n][0] + upper.y * sums[0][n][1];
      total.y += lower.x * sums[0][n][2] + lower.y * sums[0][n][3];
    }
    return make_float2(quad_sum(total.x), quad_sum(total.y));
  }
  // Differentiate the normalisation: dx = sum - f^2 x <x, sum>.
  __device__ __forceinline__ void project(Sums& sums, const Rows& tile, const float (&factors)[kDeltaChunk],
                                          const float2& all) const {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const float factor = factors[row() + 8 * lower], by = factor * factor * (lower ? all.y : all.x);
#pragma unroll
      for (int n = 0; n < Sums::kN; ++n) {
        const float2 x = pair_of(tile, n, lower);
        sums[0][n][2 * lower] -= by * x.x, sums[0][n][2 * lower + 1] -= by * x.y;
      }
    }
  }
  // Store dq or dk through this warp's part of a tile that no other warp still reads.
  __device__ __forceinline__ void store(void* to, const Cursor& at, const Sums& sums, const Rows& tile) const {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < Sums::kN; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        ptx::store_shared(pair_address(tile, n, i), pack<T>(sums[0][n][2 * i], sums[0][n][2 * i + 1]));
    }
    __syncwarp();
    constexpr int kUnits = kKeys / 16, kRows = 32 / kUnits;  // at a time
    const int unit = half * kUnits + lane % kUnits;
#pragma unroll
    for (int i = 0; i < 16 / kRows; ++i) {
      const int token = 16 * rows + i * kRows + lane / kUnits;
      const int64_t start =
          ((at.chunk.batch * in.num_tokens + at.chunk.first + token) * in.num_heads + at.qk_head) * in.key_dim;
      const uint4 eight = ptx::load_shared_16(KeyRows::chunk(KeyRows::row(ptx::shared_address(tile), token), unit));
      const int key = part(at) * kKeys + 8 * unit;
      if (token < at.chunk.count && key < in.key_dim)
        *reinterpret_cast<uint4*>(static_cast<T*>(to) + start + key) = eight;
    }
  }

  // Sum gates from the last token to the first, with one warp.
  __device__ __forceinline__ void store_gates(const Cursor& at, const float (&row_dot)[2][kDeltaChunk],
                                              const float (&after_parts)[8]) const {
    const auto token_dot = [&](int i) { return row_dot[0][i] + row_dot[1][i]; };
    const int last = kDeltaChunk - 1 - 2 * lane;  // this lane has the tokens last and last - 1
    const float last_dot = token_dot(last);
    float sum = last_dot + token_dot(last - 1);
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const float other = __shfl_up_sync(kAllLanes, sum, by);
      if (lane >= by) sum += other;
    }
    float before = __shfl_up_sync(kAllLanes, sum, 1);
    if (lane == 0) before = 0;
    float after = 0;
#pragma unroll
    for (float part : after_parts) after += part;
    float* to = static_cast<float*>(p.grad_g);
    const auto write = [&](int i, float value) {  // later key parts add to it
      if (i < at.chunk.count) to[token(i, at)] = part(at) > 0 ? to[token(i, at)] + value : value;
    };
    write(last, after + before + last_dot), write(last - 1, after + sum);
  }
  // Store the diagonal of <dy_i, r_j>.
  __device__ __forceinline__ void store_betas(const Cursor& at, const Accumulator<16, kDeltaChunk>& local) const {
    float upper = 0, lower = 0;
#pragma unroll
    for (int pair = 0; pair < kDeltaChunk / 16; ++pair) {
      if (pair == rows) {
        const auto &left = local[0][2 * pair], &right = local[0][2 * pair + 1];
        upper = lane / 4 % 2 ? left[1] : left[0], lower = lane / 4 % 2 ? right[3] : right[2];
      }
    }
    if (lane % 4 != lane / 8) return;
    float* to = static_cast<float*>(p.grad_beta);
    if (row() < at.chunk.count) to[token(row(), at)] = upper;
    if (row() + 8 < at.chunk.count) to[token(row() + 8, at)] = lower;
  }
  // Store dV over dy.
  __device__ __forceinline__ void store_values(const uint4 (&tile)[kDeltaChunk][Shape::kSlice / 8], const Cursor& at,
                                               const float (&betas)[kDeltaChunk]) const {
    constexpr int kUnits = Shape::kSlice / 8;
    const int first = at.slice * Shape::kSlice;
#pragma unroll
    for (int i = 0; i < kDeltaChunk * kUnits / kThreads; ++i) {
      const int row = thread / kUnits + i * (kThreads / kUnits), unit = thread % kUnits;
      using Tile = Swizzle<2 * Shape::kSlice>;
      uint4 eight = ptx::load_shared_16(Tile::chunk(Tile::row(ptx::shared_address(tile), row), unit));
      const float by = betas[row];
      const auto scaled = [by](uint32_t& pair) {
        float low, high;
        unpack<T>(pair, low, high), pair = pack<T>(by * low, by * high);
      };
      scaled(eight.x), scaled(eight.y), scaled(eight.z), scaled(eight.w);
      if (row < at.chunk.count && first + 8 * unit < in.value_dim)
        *reinterpret_cast<uint4*>(static_cast<T*>(p.grad_v) + token(row, at) * in.value_dim + first + 8 * unit) = eight;
    }
  }

 private:
  __device__ __forceinline__ int64_t token(int i, const Cursor& at) const {
    return (at.chunk.batch * in.num_tokens + at.chunk.first + i) * in.num_value_heads + at.value_head(grid);
  }
  // Return the smem address of a lane's pair of accumulator tile n, in the upper or the lower row.
  __device__ __forceinline__ uint32_t pair_address(const Rows& tile, int n, int lower) const {
    const uint32_t start = KeyRows::row(ptx::shared_address(tile), row() + 8 * lower);
    return KeyRows::chunk(start, half * (kKeys / 16) + n) + lane % 4 * 4;
  }
};

}  // namespace flashinfer::cuda
