// Matrix products of a scan. The state is transposed: its columns are the A operand, in registers. B operands
// are tiles of k or q, -Z or P, and rows that are added to the state.
//
// DeltaWarpProducts uses mma.sync. DeltaWarpgroupProducts uses wgmma, which is asynchronous: four warps share
// each B operand in smem.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/chunk.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>
#include <flashinfer/cuda/ptx/wgmma.cuh>
#include <flashinfer/cuda/tile/descriptor.cuh>

namespace flashinfer::cuda {

// -Z and P in smem for wgmma: tiles of 64 rows of 128 bytes, swizzled, with zeros above the diagonal.
using DeltaTileMatrix = uint4[kDeltaChunk][kDeltaChunk / 8];
struct DeltaTileZ {
  alignas(1024) DeltaTileMatrix z;
};
struct DeltaTileMatrices : DeltaTileZ {
  alignas(1024) DeltaTileMatrix p;
};
template <typename Matrices_>
struct DeltaTileTerms : Matrices_, DeltaFactors {
  using Matrices = Matrices_;
};

// Accumulators of 16 columns and 64 tokens, and A operands: 16 columns by tokens, or by rows of the state.
using DeltaSums16 = Accumulator<16, kDeltaChunk>;
using DeltaOperandA = uint32_t[kDeltaChunk / 16][4];
template <int kKeys>
using DeltaStateOperandA = uint32_t[kKeys / 16][4];

template <typename T, int kKeys>
struct DeltaWarpProducts {
  using State = Accumulator<16, kKeys>;
  using Keys = uint4[kDeltaChunk][kKeys / 8];
  static constexpr int kBytes = 2 * kKeys, kSteps = kDeltaChunk / 16;

  // mma.sync is complete when it returns.
  template <int kPending, typename... Registers>
  __device__ __forceinline__ static void wait(Registers&...) {}

  // sums = S' K' or S' Q'. Here and in update_state(), each(i) runs right before the products with a[i], so
  // that its work overlaps with them.
  template <typename Each>
  __device__ __forceinline__ static void multiply_state(DeltaSums16& sums, const DeltaStateOperandA<kKeys>& a,
                                                        const Keys& tile, const Each& each) {
    const SmemOperandB<kBytes, kDeltaChunk> rows(ptx::shared_address(tile), 0);
    sums.clear();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      each(step);
#pragma unroll
      for (int pair = 0; pair < kSteps; ++pair) {
        uint32_t b[2][2];
        rows.load(b, pair, step), add(sums, a[step], b, pair);
      }
    }
  }
  __device__ __forceinline__ static void multiply_state(DeltaSums16& sums, const DeltaStateOperandA<kKeys>& a,
                                                        const Keys& tile) {
    multiply_state(sums, a, tile, [](int) {});
  }
  // sums += A times a lower triangular matrix of blocks, or its transpose. kFirst: sums are zero before.
  template <bool kTransposed, bool kFirst = false>
  __device__ __forceinline__ static void multiply(DeltaSums16& sums, const DeltaOperandA& left,
                                                  const DeltaMatrices::Matrix& blocks) {
    if (kFirst) sums.clear();
#pragma unroll
    for (int column = 0; column < kSteps; ++column) {
#pragma unroll
      for (int row = column; row < kSteps; ++row) {
        uint32_t r[4];
        load_block<!kTransposed>(r, ptx::shared_address(blocks[DeltaMatrices::block(row, column)]));
        if constexpr (kTransposed) {
          const uint32_t b[2][2] = {{r[0], r[1]}, {r[2], r[3]}};
          add(sums, left[column], b, row);
        } else {
          const uint32_t b[2][2] = {{r[0], r[2]}, {r[1], r[3]}};
          add(sums, left[row], b, column);
        }
      }
    }
  }
  // state += A times rows of k or q.
  template <typename Each>
  __device__ __forceinline__ static void update_state(State& state, const DeltaOperandA& a, const Keys& tile,
                                                      const Each& each) {
    const SmemOperandBTransposed<kBytes, kDeltaChunk> rows(ptx::shared_address(tile), 0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      each(step);
#pragma unroll
      for (int pair = 0; pair < kKeys / 16; ++pair) {
        uint32_t b[2][2];
        rows.load(b, step, 2 * pair), add(state, a[step], b, pair);
      }
    }
  }
  __device__ __forceinline__ static void update_state(State& state, const DeltaOperandA& a, const Keys& tile) {
    update_state(state, a, tile, [](int) {});
  }

 private:
  template <typename Sums>
  __device__ __forceinline__ static void add(Sums& sums, const uint32_t (&a)[4], const uint32_t (&b)[2][2], int pair) {
    mma<T>(sums[0][2 * pair], a, b[0][0], b[0][1]), mma<T>(sums[0][2 * pair + 1], a, b[1][0], b[1][1]);
  }
};

template <typename T, int kKeys>
struct DeltaWarpgroupProducts {
  using State = Accumulator<16, kKeys>;
  using Keys = uint4[kDeltaChunk][kKeys / 8];
  using Tile = ChunkedTile<kDeltaChunk>;  // of 64 keys or tokens, one after the other
  static constexpr auto kType = ptx::kWgmmaType<T>;
  static constexpr int kSteps = kDeltaChunk / 16;

  // Wait until at most kPending products are in flight. Operands and results of the others can then be used.
  template <int kPending, typename... Registers>
  __device__ __forceinline__ static void wait(Registers&... registers) {
    ptx::warpgroup_wait<kPending>();
    (hold(registers), ...);
  }

  __device__ __forceinline__ static void multiply_state(DeltaSums16& sums, const DeltaStateOperandA<kKeys>& a,
                                                        const Keys& tile) {
    const uint64_t rows = Tile::k_contiguous(ptx::shared_address(tile));
    ptx::warpgroup_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      add<false>(sums, a[step], rows + Tile::k_contiguous_step(step), step > 0);
    ptx::warpgroup_commit();
  }
  template <bool kTransposed, bool kFirst = false>
  __device__ __forceinline__ static void multiply(DeltaSums16& sums, const DeltaOperandA& left,
                                                  const DeltaTileMatrix& tile) {
    const uint32_t start = ptx::shared_address(tile);
    const uint64_t rows = kTransposed ? Tile::k_contiguous(start) : Tile::n_contiguous(start);
    ptx::warpgroup_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      add<!kTransposed>(sums, left[step],
                        rows + (kTransposed ? Tile::k_contiguous_step(step) : Tile::n_contiguous_step(step)),
                        !kFirst || step > 0);
    ptx::warpgroup_commit();
  }
  __device__ __forceinline__ static void update_state(State& state, const DeltaOperandA& a, const Keys& tile) {
    const uint64_t rows = Tile::n_contiguous(ptx::shared_address(tile));
    ptx::warpgroup_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) add<true>(state, a[step], rows + Tile::n_contiguous_step(step), true);
    ptx::warpgroup_commit();
  }

 private:
  template <int kColumns>
  using Flat = float[kColumns / 2];

  template <bool kTransB, int kColumns>
  __device__ __forceinline__ static void add(Accumulator<16, kColumns>& sums, const uint32_t (&a)[4], uint64_t b,
                                             bool accumulate) {
    ptx::Wgmma<kColumns>::template rs<kType, kTransB>(reinterpret_cast<Flat<kColumns>&>(sums.tile), a[0], a[1], a[2],
                                                      a[3], b, accumulate);
  }
  template <int kColumns>
  __device__ __forceinline__ static void hold(Accumulator<16, kColumns>& sums) {
    ptx::warpgroup_hold(reinterpret_cast<Flat<kColumns>&>(sums.tile));
  }
  template <int kTiles>
  __device__ __forceinline__ static void hold(uint32_t (&left)[kTiles][4]) {
    ptx::warpgroup_hold(reinterpret_cast<uint32_t (&)[4 * kTiles]>(left));
  }
};

}  // namespace flashinfer::cuda
