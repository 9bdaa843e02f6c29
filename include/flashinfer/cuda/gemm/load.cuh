// Load the tiles of A and B of a step of k into smem, through registers. Widen 8-bit elements. Elements after
// the end of a row, column or block of k are zero.
#pragma once

#include <cstdint>
#include <cstring>

#include <flashinfer/cuda/gemm/shape.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>

namespace flashinfer::cuda {

// kCount elements of T, which take 16 bytes in smem.
template <typename T, int kCount>
struct GemmChunk {
  static constexpr int kBytes = kCount * sizeof(T);
  uint32_t word[kBytes / 4];

  // Load the first `count` elements at `from`.
  __device__ __forceinline__ void load(const T* from, int64_t count, bool vectors) {
    if (vectors && count >= kCount) {
      if constexpr (kBytes == 16) {
        const uint4 raw = *reinterpret_cast<const uint4*>(from);
        memcpy(word, &raw, 16);
      } else {
        const uint2 raw = *reinterpret_cast<const uint2*>(from);
        memcpy(word, &raw, 8);
      }
      return;
    }
    T numbers[kCount];
    memset(numbers, 0, sizeof(numbers));
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i < count) numbers[i] = from[i];
    memcpy(word, numbers, kBytes);
  }

  __device__ __forceinline__ void store(uint32_t to) const {
    if constexpr (kBytes == 16) {
      ptx::store_shared_16(to, {word[0], word[1], word[2], word[3]});
    } else {
      ptx::store_shared_16(to, {widen_to_half<T>(word[0]), widen_to_half<T>(word[0] >> 16), widen_to_half<T>(word[1]),
                                widen_to_half<T>(word[1] >> 16)});
    }
  }
};

// Share of a thread in the loads of a tile.
template <typename Shape>
class GemmLoader {
  using A = typename Shape::A;
  using B = typename Shape::B;
  static constexpr int kChunk = Shape::kChunk, kThreads = Shape::kThreads;
  static constexpr int kAChunksPerRow = Shape::kDepth / kChunk;
  static constexpr int kAChunks = Shape::kRows * kAChunksPerRow,
                       kAChunksPerThread = (kAChunks + kThreads - 1) / kThreads;
  static constexpr int kBChunksPerRow = (Shape::kKMajor ? Shape::kDepth : Shape::kColumns) / kChunk;
  static constexpr int kBChunksPerThread = Shape::kColumns * Shape::kDepth / kChunk / kThreads;
  static constexpr int kARowStep = kThreads / kAChunksPerRow, kBRowStep = kThreads / kBChunksPerRow;
  static_assert(kThreads % kAChunksPerRow == 0 && kThreads % kBChunksPerRow == 0,
                "a thread loads one column of chunks");

 public:
  __device__ __forceinline__ GemmLoader(const GemmParams& params, const GemmSettings& settings, const GemmTile& tile)
      : p_(params), settings_(settings), column_(tile.column) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kAChunksPerThread; ++i) {
      const int row = thread / kAChunksPerRow + i * kARowStep;
      const int64_t from = row < Shape::kRows ? source(tile, row) : -1;
      a_row_[i] = from < 0 ? nullptr : static_cast<const A*>(p_.a) + p_.a_layout.offset(from);
    }
    b_ = static_cast<const B*>(p_.b) + tile.matrix * p_.b_matrix_stride;
    factor_ = nullptr, factor_stride_ = 0;
    if (thread < 128) {
      const int64_t from = thread < Shape::kRows && p_.a_scale.data ? source(tile, thread) : -1;
      if (from >= 0) factor_ = p_.a_scale.of_row(0, from), factor_stride_ = p_.a_scale.depth_stride;
    } else if (p_.b_scale.data && column_ + thread - 128 < p_.n) {
      factor_ = p_.b_scale.of_row(tile.matrix, column_ + thread - 128), factor_stride_ = p_.b_scale.depth_stride;
    }
  }

  // Load elements [k, end) of k into registers, at most one step. `block` selects their scale factor.
  __device__ __forceinline__ void load(int64_t k, int64_t end, int64_t block) {
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t left_k = k + thread % kAChunksPerRow * kChunk;
#pragma unroll
    for (int i = 0; i < kAChunksPerThread; ++i)
      a_chunk_[i].load(a_row_[i] + left_k, a_row_[i] ? end - left_k : 0, settings_.a_vectors);
    const int row = thread / kBChunksPerRow, at = thread % kBChunksPerRow * kChunk;
#pragma unroll
    for (int i = 0; i < kBChunksPerThread; ++i) {
      if constexpr (Shape::kKMajor) {
        const int64_t column = column_ + row + i * kBRowStep, depth = k + at;
        b_chunk_[i].load(b_ + column * p_.b_stride_n + depth, column < p_.n ? end - depth : 0, settings_.b_vectors);
      } else {
        const int64_t depth = k + row + i * kBRowStep, column = column_ + at;
        b_chunk_[i].load(b_ + depth * p_.b_stride_k + column, depth < end ? p_.n - column : 0, settings_.b_vectors);
      }
    }
    factor_value_ = factor_ ? factor_[block * factor_stride_] : 1.0f;
  }

  __device__ __forceinline__ void store(uint32_t stage) const {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kAChunksPerThread; ++i) {
      const int row = thread / kAChunksPerRow + i * kARowStep;
      if (kAChunks % kThreads == 0 || row < Shape::kRows)
        a_chunk_[i].store(chunk_address<Shape::kARowBytes>(stage + Shape::kAAt, row, thread % kAChunksPerRow));
    }
#pragma unroll
    for (int i = 0; i < kBChunksPerThread; ++i)
      b_chunk_[i].store(chunk_address<Shape::kBRowBytes>(stage + Shape::kBAt, thread / kBChunksPerRow + i * kBRowStep,
                                                         thread % kBChunksPerRow));
    ptx::store_shared(stage + Shape::kFactorsAt + thread * 4, __float_as_uint(factor_value_));
  }

 private:
  template <int kBytes>
  __device__ __forceinline__ static uint32_t chunk_address(uint32_t start, int row, int chunk) {
    return Swizzle<kBytes>::chunk(Swizzle<kBytes>::row(start, row), chunk);
  }

  // Return the row of a that a row of the tile reads, or -1 if there is none.
  __device__ __forceinline__ int64_t source(const GemmTile& tile, int row) const {
    if (tile.row + row >= tile.end) return -1;
    if (!p_.a_rows) return tile.row + row;
    const int64_t from = p_.a_rows[tile.row + row];
    return from < p_.a_num_rows ? from : -1;
  }

  const GemmParams& p_;
  const GemmSettings& settings_;
  const A* a_row_[kAChunksPerThread];
  const B* b_;
  const float* factor_;
  int64_t factor_stride_;
  int32_t column_;
  GemmChunk<A, kChunk> a_chunk_[kAChunksPerThread];
  GemmChunk<B, kChunk> b_chunk_[kBChunksPerThread];
  float factor_value_;
};

}  // namespace flashinfer::cuda
