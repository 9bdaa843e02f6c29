// Slices of the chunk gradients: loads of 64 columns of a value head, and scaling of their sums.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/backward/output.cuh>
#include <flashinfer/cuda/delta_rule/chunk/backward/products.cuh>
#include <flashinfer/cuda/delta_rule/chunk/backward/scan.cuh>
#include <flashinfer/cuda/ptx/approx.cuh>

namespace flashinfer::cuda {

// 64 columns of dO, dy, r, S before a chunk and D after it.
template <typename Shape>
struct DeltaGradientStage {
  static constexpr int kStrips = Shape::kSlice / 16;
  alignas(1024) uint4 grad_o[kDeltaChunk][Shape::kSlice / 8];
  alignas(1024) uint4 grad_y[kDeltaChunk][Shape::kSlice / 8];
  DeltaBlock16 r[kStrips][kDeltaChunk / 16];
  DeltaBlock16 state[kStrips][Shape::kKeys / 16];
  DeltaBlock16 grad[kStrips][Shape::kKeys / 16];
};

template <typename Shape>
struct DeltaGradientSlices : DeltaGradientOutput<Shape> {
  using Base = DeltaGradientOutput<Shape>;
  using T = typename Shape::T;
  using Products = typename Shape::Products;
  using Stage = DeltaGradientStage<Shape>;
  using Matrix = typename Products::Matrix;
  using GradientSums = typename Products::Sums;
  using Sums = typename GradientSums::Keys;
  using Cursor = GradientCursor;
  static constexpr int kThreads = Shape::kThreads;
  using Base::half, Base::lane, Base::row, Base::rows, Base::thread;
  using Base::p, Base::in, Base::grid;

  const DeltaBackwardWorkspace& workspace;

  __device__ __forceinline__ DeltaGradientSlices(const DeltaRuleBackwardParams& params, const GradientGrid& grid_,
                                                 const DeltaBackwardWorkspace& workspace_)
      : Base(params, grid_), workspace(workspace_) {}

  __device__ __forceinline__ void load_slice(Stage& to, const Cursor& at) const {
    const int64_t heads = in.num_value_heads, values = in.value_dim;
    const int first = at.slice * Shape::kSlice;
    const TokenStrides strides{in.num_tokens * heads * values, heads * values, values};
    copy_tokens<T, 2 * Shape::kSlice, kThreads>(ptx::shared_address(to.grad_o), p.grad_o, strides, at.chunk,
                                                at.value_head(grid), first, values, thread);
    copy_tokens<T, 2 * Shape::kSlice, kThreads>(ptx::shared_address(to.grad_y), p.grad_v, strides, at.chunk,
                                                at.value_head(grid), first, values, thread);
    const int64_t index = at.index(in, grid);
    const int strip = at.slice * Stage::kStrips;
    const auto strips_inside = static_cast<int>((values - first + 15) / 16);           // zeros follow
    constexpr int64_t kState = sizeof(to.state[0]), kStates = Shape::kParts * kState;  // bytes of a part, and of all
    const int64_t state = index * workspace.state_bytes + strip * kStates + this->part(at) * kState;
    copy(to.r, workspace.residuals + index * workspace.residual_bytes + strip * sizeof(to.r[0]), sizeof(to.r[0]),
         strips_inside);
    copy(to.state, workspace.states + state, kStates, strips_inside);
    copy(to.grad, workspace.grads + state, kStates, strips_inside);
  }
  __device__ __forceinline__ static float dot(uint32_t first, uint32_t second) {
    float a[2], b[2];
    unpack<T>(first, a[0], a[1]), unpack<T>(second, b[0], b[1]);
    return a[0] * b[0] + a[1] * b[1];
  }

  // Store dP or X to smem, on and below the diagonal. The rounding error of an element of X is added to the
  // lane's next element of the row. For similar keys, dg contains sums of X over rectangles, and the carry
  // keeps their errors from growing with the width.
  __device__ __forceinline__ void store_local(Matrix& dp, Matrix& x, const DeltaGradientFactors& factors,
                                              const Accumulator<16, kDeltaChunk>& local, float scale) const {
    const auto row_factor = [&](int at) {
      return half ? -factors.k_factor[at] * factors.beta[at] : scale * factors.q_factor[at];
    };
    const float sums[2] = {factors.log2_decay[row()], factors.log2_decay[row() + 8]},
                by[2] = {row_factor(row()), row_factor(row() + 8)};
    const auto error_of = [&](float x) { return half ? x - to_float(from_float<T>(x)) : 0.f; };
    float carry[2] = {};
#pragma unroll
    for (int pair = 0; pair < kDeltaChunk / 16; ++pair) {
      if (pair > rows) continue;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // upper left, upper right, lower left, lower right
        const int column = 16 * pair + 8 * (i % 2) + 2 * (lane % 4), at = row() + i / 2 * 8;
        const auto two = [&](const float (&of)[kDeltaChunk]) { return *reinterpret_cast<const float2*>(&of[column]); };
        const float2 others = two(factors.log2_decay), k = two(factors.k_factor), beta = two(factors.beta);
        float first = ptx::ex2_approx(sums[i / 2] - others.x) * by[i / 2] * (k.x * beta.x);
        float second = ptx::ex2_approx(sums[i / 2] - others.y) * by[i / 2] * (k.y * beta.y);
        const float* const sum = &local[0][2 * pair + i % 2][i / 2 * 2];
        first = first * sum[0] + carry[i / 2];
        if (pair == rows) first = column + half <= at ? first : 0.f;
        second = second * sum[1] + error_of(first);
        if (pair == rows) second = column + 1 + half <= at ? second : 0.f;
        carry[i / 2] = error_of(second);
        words[i] = pack<T>(first, second);
      }
      Products::put(half ? x : dp, pair, words);
    }
  }

  // Return the workspace that holds dq or dk of a key part until the other parts are finished.
  __device__ __forceinline__ float2* saved(const Cursor& at, int which) const {
    const int64_t number = (static_cast<int64_t>(at.item) * Shape::kParts + at.part) * 2 + which;
    return reinterpret_cast<float2*>(workspace.sums) + number * (kDeltaChunk * Shape::kKeys / 2) + thread;
  }
  __device__ __forceinline__ void save(const Cursor& at, int which, const Sums& sums) const {
    float2* const to = saved(at, which);
#pragma unroll
    for (int n = 0; n < Sums::kN; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) to[(2 * n + i) * kThreads] = make_float2(sums[0][n][2 * i], sums[0][n][2 * i + 1]);
    }
  }
  // Load saved sums and differentiates the normalisation of the rows of `x`.
  __device__ __forceinline__ void restore(const Cursor& at, int which, const void* x, const TokenStrides& strides,
                                          const float (&factors)[kDeltaChunk], const float2& all, Sums& sums) const {
    const float2* const from = saved(at, which);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = row() + 8 * i;
      const float by = factors[token] * factors[token] * (i ? all.y : all.x);
      const T* rows_of_x = static_cast<const T*>(x) + strides.at(at.chunk.batch, at.chunk.first + token, at.qk_head);
#pragma unroll
      for (int n = 0; n < Sums::kN; ++n) {
        const int key = at.part * Shape::kKeys + half * (Shape::kKeys / 2) + 8 * n + lane % 4 * 2;
        float2 two = from[(2 * n + i) * kThreads], pair = make_float2(0.f, 0.f);
        if (token < at.chunk.count && key < in.key_dim)
          unpack<T>(*reinterpret_cast<const uint32_t*>(rows_of_x + key), pair.x, pair.y);
        sums[0][n][2 * i] = two.x - by * pair.x, sums[0][n][2 * i + 1] = two.y - by * pair.y;
      }
    }
  }

  // Multiply the sums of all slices by their factors outside Gam.
  __device__ __forceinline__ void scale_sums(GradientSums& sums, const DeltaGradientFactors& factors) const {
    const int upper = row(), lower = row() + 8;
    scale_rows(sums.dq, factors.q_decay[upper], factors.q_decay[lower]);
    scale_rows(sums.dk_row, -factors.k_decay[upper] * factors.beta[upper],
               -factors.k_decay[lower] * factors.beta[lower]);
    scale_rows(sums.dk_col, factors.update_decay[upper] * factors.beta[upper],
               factors.update_decay[lower] * factors.beta[lower]);
  }

 private:
  // Copy strips, which are `stride` bytes apart.
  template <typename Blocks>
  __device__ __forceinline__ void copy(Blocks& to, const char* from, int64_t stride, int strips) const {
    constexpr int kStep = kThreads * 16, kStrip = sizeof(to[0]);
    static_assert(sizeof(Blocks) % kStep == 0, "all threads copy the same amount");
    const uint32_t start = ptx::shared_address(to) + thread * 16;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Blocks)) / kStep; ++i) {
      const int at = thread * 16 + i * kStep, strip = at / kStrip;
      ptx::cp_async_16(start + i * kStep, from + strip * stride + at % kStrip, strip < strips);
    }
  }
  // Multiply a lane's elements by the factor of their row.
  __device__ __forceinline__ static void scale_rows(Sums& sums, float upper, float lower) {
#pragma unroll
    for (int n = 0; n < Sums::kN; ++n)
      sums[0][n][0] *= upper, sums[0][n][1] *= upper, sums[0][n][2] *= lower, sums[0][n][3] *= lower;
  }
};

}  // namespace flashinfer::cuda
