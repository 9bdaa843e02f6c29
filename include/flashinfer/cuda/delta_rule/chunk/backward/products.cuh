// Matrix products of a chunk's gradients. A slice of columns contributes to dP or X, dO S', dR S' and u D'.
// After all slices come the products with dP and X.
//
// Four warps cover the tokens of the chunk. There are two such sets, one for each half of the keys. The first
// set computes dP, the second X. DeltaWarpGradients uses mma.sync, DeltaWarpgroupGradients uses wgmma with
// both operands in smem.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/products.cuh>

namespace flashinfer::cuda {

// Position of a thread. Every construction recomputes it, because sums need the registers.
struct DeltaGradientThread {
  int thread, lane, rows, half;

  __device__ __forceinline__ DeltaGradientThread() : thread(threadIdx.x) {
    asm volatile("" : "+r"(thread));
    lane = thread % 32, rows = thread / 32 % 4, half = thread / 128;
  }
  __device__ __forceinline__ int row() const { return 16 * rows + lane / 4; }
};

// Sums of 16 tokens and half of the keys: dq, two parts of dk, and dP or X.
template <int kKeys>
struct DeltaGradientSums {
  using Keys = Accumulator<16, kKeys / 2>;
  Keys dq, dk_row, dk_col;
  Accumulator<16, kDeltaChunk> local;
};

template <typename T, int kKeys>
struct DeltaWarpGradients : DeltaGradientThread {
  using Sums = DeltaGradientSums<kKeys>;
  using Matrix = DeltaMatrices::Matrix;
  using Rows = uint4[kDeltaChunk][kKeys / 8];
  static constexpr int kPairs = kKeys / 32, kSteps = kDeltaChunk / 16;

  // mma.sync is complete when it returns.
  __device__ __forceinline__ static void wait(Sums&) {}
  __device__ __forceinline__ static void publish() {}

  template <typename Stage>
  __device__ __forceinline__ void add_slice(const Stage& stage, Sums& sums, bool first) const {
    constexpr int kBytes = sizeof(stage.grad_o[0]);
    const SmemOperandA<kBytes> outs(ptx::shared_address(stage.grad_o), 16 * rows);
    const SmemOperandA<kBytes> values(ptx::shared_address(stage.grad_y), 16 * rows);
    if (first) sums.dq.clear(), sums.dk_row.clear(), sums.dk_col.clear(), sums.local.clear();
#pragma unroll
    for (int step = 0; step < Stage::kStrips; ++step) {
      uint32_t out[1][4], value[1][4], u[1][4], local_a[1][4], r[4];
      outs.load(out[0], 0, step), values.load(value[0], 0, step);
      load_block_a<true>(u[0], ptx::shared_address(stage.r[step][rows]));
#pragma unroll
      for (int i = 0; i < 4; ++i) local_a[0][i] = half ? value[0][i] : out[0][i];
#pragma unroll
      for (int pair = 0; pair < kSteps; ++pair) {
        if (pair > rows) continue;
        load_block<true>(r, ptx::shared_address(stage.r[step][pair]));
        const uint32_t b[2][2] = {{r[0], r[1]}, {r[2], r[3]}};
        sums.local.template add<T>(local_a, b, pair);
      }
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        uint32_t s[4];
        load_block<true>(s, ptx::shared_address(stage.state[step][half * kPairs + pair]));
        load_block<true>(r, ptx::shared_address(stage.grad[step][half * kPairs + pair]));
        const uint32_t state[2][2] = {{s[0], s[1]}, {s[2], s[3]}}, grad[2][2] = {{r[0], r[1]}, {r[2], r[3]}};
        sums.dq.template add<T>(out, state, pair), sums.dk_row.template add<T>(value, state, pair);
        sums.dk_col.template add<T>(u, grad, pair);
      }
    }
  }

  // Store pairs of a block of dP or X in accumulator layout.
  __device__ __forceinline__ void put(Matrix& to, int column, const uint32_t (&words)[4]) const {
    if (column <= rows) store_block(to[DeltaMatrices::block(rows, column)], words);
  }

  __device__ __forceinline__ void add_local(const Rows& k, const Rows& q, const Matrix& p, const Matrix& x,
                                            Sums& sums) const {
    using KeyRows = SmemOperandBTransposed<2 * kKeys, kDeltaChunk>;
    const KeyRows keys(ptx::shared_address(k), 0), queries(ptx::shared_address(q), 0);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t p_block[1][4], x_block[1][4], b[2][2];
      if (m <= rows) {
        const int block = DeltaMatrices::block(rows, m);
        load_block_a<false>(p_block[0], ptx::shared_address(p[block]));
        load_block_a<false>(x_block[0], ptx::shared_address(x[block]));
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          keys.load(b, m, half * (kKeys / 16) + 2 * pair);
          sums.dq.template add<T>(p_block, b, pair), sums.dk_row.template add<T>(x_block, b, pair);
        }
      }
      if (m >= rows) {
        const int block = DeltaMatrices::block(m, rows);
        load_block<true>(p_block[0], ptx::shared_address(p[block]));
        load_block<true>(x_block[0], ptx::shared_address(x[block]));
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          queries.load(b, m, half * (kKeys / 16) + 2 * pair);
          sums.dk_col.template add<T>(p_block, b, pair);
          keys.load(b, m, half * (kKeys / 16) + 2 * pair);
          sums.dk_col.template add<T>(x_block, b, pair);
        }
      }
    }
  }
};

template <typename T, int kKeys>
struct DeltaWarpgroupGradients : DeltaGradientThread {
  using Sums = DeltaGradientSums<kKeys>;
  using Matrix = DeltaTileMatrix;
  using Rows = uint4[kDeltaChunk][kKeys / 8];
  using Tile = ChunkedTile<kDeltaChunk>;
  using Keys = ptx::Wgmma<kKeys / 2>;
  static constexpr auto kType = ptx::kWgmmaType<T>;
  static constexpr int kSteps = kDeltaChunk / 16;

  __device__ __forceinline__ static void wait(Sums& sums) {
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(flat(sums.dq)), ptx::warpgroup_hold(flat(sums.dk_row)), ptx::warpgroup_hold(flat(sums.dk_col));
    ptx::warpgroup_hold(flat(sums.local));
  }
  // Make this thread's stores and copy visible to wgmma. Called before the barrier.
  __device__ __forceinline__ static void publish() { ptx::fence_proxy_async(); }

  template <typename Stage>
  __device__ __forceinline__ void add_slice(const Stage& stage, Sums& sums, bool first) const {
    constexpr int kHalf = kKeys / 32 * sizeof(DeltaBlock16);
    const uint64_t outs = Tile::k_contiguous(ptx::shared_address(stage.grad_o));
    const uint64_t values = Tile::k_contiguous(ptx::shared_address(stage.grad_y));
    const uint64_t r = blocks(ptx::shared_address(stage.r));
    const uint64_t state = blocks(ptx::shared_address(stage.state) + half * kHalf);
    const uint64_t grad = blocks(ptx::shared_address(stage.grad) + half * kHalf);
    const uint64_t local_a = half ? values : outs;
    ptx::warpgroup_fence();
#pragma unroll
    for (int step = 0; step < Stage::kStrips; ++step) {
      const uint64_t by = Tile::k_contiguous_step(step), r_by = step * sizeof(stage.r[0]) >> 4;
      const uint64_t state_by = step * sizeof(stage.state[0]) >> 4;
      const bool accumulate = step > 0 || !first;
      Keys::template ss<kType, true>(flat(sums.dq), outs + by, state + state_by, accumulate);
      Keys::template ss<kType, true>(flat(sums.dk_row), values + by, state + state_by, accumulate);
      Keys::template ss<kType, true, true>(flat(sums.dk_col), r + r_by, grad + state_by, accumulate);
      ptx::Wgmma<kDeltaChunk>::template ss<kType, true>(flat(sums.local), local_a + by, r + r_by, accumulate);
    }
    ptx::warpgroup_commit();
  }

  __device__ __forceinline__ void put(Matrix& to, int column, const uint32_t (&words)[4]) const {
    const uint32_t start = ptx::shared_address(to) + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::store_shared(start + Tile::unit(row() + i / 2 * 8, 2 * column + i % 2), words[i]);
  }

  __device__ __forceinline__ void add_local(const Rows& k, const Rows& q, const Matrix& p, const Matrix& x,
                                            Sums& sums) const {
    constexpr int kHalf = kKeys == 128 ? Tile::kChunkBytes : kKeys;  // bytes between the halves of the keys
    const uint64_t keys = Tile::n_contiguous(ptx::shared_address(k) + half * kHalf);
    const uint64_t queries = Tile::n_contiguous(ptx::shared_address(q) + half * kHalf);
    const uint32_t p_start = ptx::shared_address(p), x_start = ptx::shared_address(x);
    ptx::warpgroup_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t by = Tile::n_contiguous_step(step), left_by = Tile::k_contiguous_step(step);
      Keys::template ss<kType, true>(flat(sums.dq), Tile::k_contiguous(p_start) + left_by, keys + by, true);
      Keys::template ss<kType, true>(flat(sums.dk_row), Tile::k_contiguous(x_start) + left_by, keys + by, true);
      Keys::template ss<kType, true, true>(flat(sums.dk_col), Tile::n_contiguous(p_start) + by, queries + by, true);
      Keys::template ss<kType, true, true>(flat(sums.dk_col), Tile::n_contiguous(x_start) + by, keys + by, true);
    }
    ptx::warpgroup_commit();
  }

 private:
  template <int kColumns>
  __device__ __forceinline__ static float (&flat(Accumulator<16, kColumns>& sums))
      [kColumns / 2] { return reinterpret_cast<float (&)[kColumns / 2]>(sums.tile); }
  // Return the descriptor of a DeltaBlock16 whose rows are k. Bits [0, 14) address, [16, 30) bytes between
  // groups of eight rows, [32, 46) bytes between groups of eight columns, each divided by 16.
  __device__ __forceinline__ static uint64_t blocks(uint32_t address) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | uint64_t{128 >> 4} << 16 | uint64_t{256 >> 4} << 32;
  }
};

}  // namespace flashinfer::cuda
