// Tile of a CTA in grouped GEMM with MXFP4 matrices: sizes, copies to smem, and sums.
//
// The MXFP4 matrix (argument b) is operand A of mma.m16n8k16, expanded in registers. Rows of argument a are
// operand B. A thread of a quad has eight consecutive elements of 32: one word of codes, and 16 bytes of a
// row. Both operands have the elements in this order, so neither needs ldmatrix.
#pragma once

#include <cmath>
#include <cstdint>

#include <flashinfer/cuda/gemm/mxfp4/expand.cuh>
#include <flashinfer/cuda/gemm/shape.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/ptx/movmatrix.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/tile/fragment.cuh>

namespace flashinfer::cuda {

// Tile of kRows rows of a and kColumns rows of b, the columns of the output, with 128 elements of k per step.
template <typename T_, int kTileRows>
struct Mxfp4Shape {
  using T = T_;
  static constexpr int kRows = kTileRows, kColumns = kRows <= 16 ? 64 : 128;
  static constexpr int kWarpsDown = kRows <= 32 ? 1 : 2, kWarpsAcross = kRows == 32 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarpsDown * kWarpsAcross;
  static constexpr int kCtas = kRows <= 16 ? 4 : 2;  // that an SM holds at one time
  static constexpr int kStages = kRows <= 16 ? 5 : kRows == 32 ? 4 : kRows == 64 ? 3 : 2;
  static constexpr int kM = kColumns / kWarpsAcross / 16, kN = kRows / kWarpsDown / 8;
  static constexpr int kUnrolledGroups = kRows <= 16   ? 4
                                         : kRows == 32 ? 2
                                                       : 1;  // of four groups with a scale each; registers limit it
  static constexpr int kCodePitch = kMxfp4Depth / 2 + 16;    // rows of codes start in different banks
  static constexpr int kRowBytes = kMxfp4Depth * 2;
  static constexpr int kScalesAt = kColumns * kCodePitch, kRowsAt = kScalesAt + kColumns * 4;
  static constexpr int kStageBytes = kRowsAt + kRows * kRowBytes, kTableAt = kStages * kStageBytes;
  static constexpr int kTileAt = kTableAt + kRows * 4, kSharedBytes = kTileAt + 16 + 128;
  static_assert(kRowsAt % 128 == 0 && kStageBytes % 128 == 0, "rows start at multiples of 128");

  // Return the offset of 16 bytes of a row in a stage. Four chunks of each of two adjacent rows cover all
  // banks.
  __device__ __forceinline__ static uint32_t chunk_at(int row, int chunk) {
    return kRowsAt + row * kRowBytes + (chunk ^ (row & 1) * 4) * 16;
  }
};

// Rows of the output from `row` on, up to the group's end. The binding refuses more rows than an int32
// counts.
struct Mxfp4Tile {
  int32_t row, end, matrix, column;

  // In smem it takes no registers during the mainloop.
  __device__ __forceinline__ void store(uint32_t to) const {
    ptx::store_shared_16(to, make_uint4(row, end, matrix, column));
  }
  __device__ __forceinline__ static Mxfp4Tile load(uint32_t from) {
    const uint4 word = ptx::load_shared_16(from);
    return {static_cast<int32_t>(word.x), static_cast<int32_t>(word.y), static_cast<int32_t>(word.z),
            static_cast<int32_t>(word.w)};
  }
};

// Share of a thread in the copies of a tile.
template <typename Shape>
class Mxfp4Copies {
  static constexpr int kScales = Shape::kColumns / 4, kCodeStep = Shape::kColumns / 2;
  static constexpr int kChunks = Shape::kRows * 16 / Shape::kThreads, kRowStep = Shape::kThreads / 16;
  static_assert(Shape::kColumns * 4 == 2 * Shape::kThreads && kRowStep % 2 == 0, "a thread copies codes of two rows");

 public:
  __device__ __forceinline__ Mxfp4Copies(const Mxfp4GemmParams& p, const Mxfp4Tile& tile, uint32_t table)
      : p_(p),
        to_code_(thread() / 4 * Shape::kCodePitch + thread() % 4 * 16),
        to_chunk_(Shape::chunk_at(thread() / 16, thread() % 16)),
        table_(table + thread() / 16 * 4),
        has_second_(tile.column + Shape::kColumns / 2 < p.n) {
    codes_ = p.codes_of(tile.matrix, tile.column + thread() / 4) + thread() % 4 * 16;
    scales_ = p.scales_of(tile.matrix, tile.column + thread() * 4);
    if (thread() < Shape::kRows) {
      const int row = tile.row + thread();
      int from = row;
      if (p.a_rows && row < tile.end) from = p.a_rows[row];
      const bool exists = row < tile.end && from >= 0 && from < p.a_num_rows;
      ptx::store_shared(table + thread() * 4, exists ? static_cast<uint32_t>(from * p.a_layout.inner_stride / 8) : ~0u);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void start(uint32_t stage, int step) const {
    const uint8_t* codes = codes_ + step * (kMxfp4Depth / 2);
    ptx::cp_async_16(stage + to_code_, codes);
    ptx::cp_async_16(stage + to_code_ + kCodeStep * Shape::kCodePitch, codes + kCodeStep * (p_.k / 2), has_second_);
    if (thread() < kScales)
      ptx::cp_async_16(stage + Shape::kScalesAt + thread() * 16, scales_ + step * (4 * kMxfp4Rows),
                       has_second_ || thread() < kScales / 2);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint32_t row = ptx::load_shared(table_ + i * (kRowStep * 4));
      const bool exists = row != ~0u;
      ptx::cp_async_16(stage + to_chunk_ + i * kRowStep * Shape::kRowBytes,
                       static_cast<const uint4*>(p_.a) + (exists ? row + thread() % 16 + step * 16 : 0), exists);
    }
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }

  const Mxfp4GemmParams& p_;
  const uint8_t *codes_, *scales_;
  uint32_t to_code_, to_chunk_;
  uint32_t table_;   // in smem: offsets of rows of a in units of 16 bytes; all ones: no row
  bool has_second_;  // false if the matrix ends after half of the tile's columns
};

// Part of a tile that a warp computes. Its sums are of the transposed result.
template <typename Shape>
class Mxfp4Sums {
  using T = typename Shape::T;
  static constexpr int kM = Shape::kM, kN = Shape::kN;

 public:
  __device__ __forceinline__ Mxfp4Sums() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_[m][n][i] = 0;
#pragma unroll
    for (int m = 0; m < kM; ++m) nan_[m][0] = nan_[m][1] = 0;
  }

  // Add the products of 128 elements. A scale multiplies the sum of its 32 products: a power of two rounds nothing.
  __device__ __forceinline__ void multiply(uint32_t stage) {
    const uint32_t codes = stage + (first_column() + quad()) * Shape::kCodePitch + lane() * 4;
    const uint32_t chunks = stage + Shape::chunk_at(first_row() + quad(), lane());
    uint32_t scales[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scales[m][half] =
            ptx::load_shared(stage + Shape::kScalesAt + (first_column() + m * 16 + half * 8 + quad()) * 4);
        nan_[m][half] |= nan_bits(scales[m][half]);
      }
#pragma unroll Shape::kUnrolledGroups
    for (int group = 0; group < 4; ++group) {
      uint32_t a[kM][2][4];
      float scale[kM][2];
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t pair[4];
          Mxfp4Pairs<T>::expand(ptx::load_shared(codes + (m * 16 + half * 8) * Shape::kCodePitch + group * 16), pair);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i / 2][i % 2 * 2 + half] = pair[i];
          scale[m][half] = mxfp4_scale(scales[m][half]);
          scales[m][half] >>= 8;
        }
      const uint32_t chunk = (chunks ^ (group & 1) * 64) + (group >> 1) * 128;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const uint4 b = ptx::load_shared_16(chunk + n * 8 * Shape::kRowBytes);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          float part[4] = {0, 0, 0, 0};
          mma<T>(part, a[m][0], b.x, b.y);
          mma<T>(part, a[m][1], b.z, b.w);
#pragma unroll
          for (int i = 0; i < 4; ++i) sums_[m][n][i] = fmaf(part[i], scale[m][i / 2], sums_[m][n][i]);
        }
      }
    }
  }

  __device__ __forceinline__ void write(const Mxfp4GemmParams& p, const Mxfp4Tile& tile) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int row = tile.row + first_row() + n * 8 + quad();
      T* out = static_cast<T*>(p.out) + row * p.out_layout.inner_stride;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // A scale of NaN was read as infinity.
          const float factor = nan_[m][half] & 0x80808080u ? NAN : Mxfp4Pairs<T>::kFactor;
          const uint32_t pair =
              ptx::movmatrix_trans(pack<T>(sums_[m][n][2 * half] * factor, sums_[m][n][2 * half + 1] * factor));
          const int column = tile.column + first_column() + m * 16 + half * 8;
          if (row < tile.end && column < p.n) *reinterpret_cast<uint32_t*>(out + column + 2 * lane()) = pair;
        }
    }
  }

 private:
  // First row and column of the warp, number of the quad in the warp, and of the lane in the quad.
  __device__ __forceinline__ static int first_row() { return warp() / Shape::kWarpsAcross * (8 * kN); }
  __device__ __forceinline__ static int first_column() { return warp() % Shape::kWarpsAcross * (16 * kM); }
  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ __forceinline__ static int quad() { return static_cast<int>(threadIdx.x) % 32 / 4; }
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 4; }

  // Return a word with the top bit of a byte set if one of its bytes is 255.
  __device__ __forceinline__ static uint32_t nan_bits(uint32_t bytes) { return (0xfefefefeu - bytes) & bytes; }

  float sums_[kM][kN][4];
  uint32_t nan_[kM][2];  // nan_bits() of the scales of rows quad() and quad() + 8
};

}  // namespace flashinfer::cuda
