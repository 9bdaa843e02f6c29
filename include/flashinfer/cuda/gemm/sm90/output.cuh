// Epilogue of a warpgroup. It stores all tokens of a tile, and 64 columns of the output. wgmma computed the
// transposed tile, with weights (columns of the output) as rows, so an accumulator has its adjacent elements
// in different tokens.
#pragma once

#include <cstdint>

#include <flashinfer/common/gemm.h>
#include <flashinfer/cuda/gemm/sm90/rows.cuh>
#include <flashinfer/cuda/gemm/sm90/shape.cuh>
#include <flashinfer/cuda/gemm/sm90/tiles.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/ptx/stmatrix.cuh>
#include <flashinfer/cuda/ptx/tma.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/descriptor.cuh>

namespace flashinfer::cuda::sm90 {

template <typename S>
struct GemmOutput {
  const GemmParams& p;
  const GemmSettings& settings;
  const CUtensorMap& map;
  const GemmTile& tile;
  const int group;
  const int64_t column;  // first of its 64 columns
  uint32_t buffer;       // buffer of this warpgroup
  int thread = static_cast<int>(threadIdx.x) % 128;

  // The asm statement stops the compiler from holding addresses over tiles: the accumulators need the
  // registers.
  __device__ __forceinline__ GemmOutput(const GemmParams& params, const GemmSettings& settings_,
                                        const CUtensorMap& map_, const GemmTile& tile_, int group_, int64_t column_,
                                        uint32_t buffer_)
      : p(params), settings(settings_), map(map_), tile(tile_), group(group_), column(column_), buffer(buffer_) {
    asm volatile("" : "+r"(buffer), "+r"(thread));
  }

  // Store 128 bytes of each token through smem, 16 bytes per thread. Rows after the end of the group belong
  // to another group and are not stored.
  template <int kN>
  __device__ __forceinline__ void store_tokens_vectors(const float (&d)[kN / 2]) const {
    using Out = typename S::Out;
    using Lines = ChunkedTile<S::kOutRows>;
    const int lane = thread % 32, warp = thread / 32;
    // stmatrix stores four 8 x 8 matrices, and each lane has the address of one row: weights 0-7 and 8-15 of
    // 8 tokens, then of the next 8 tokens.
    const int to_row = lane / 16 * 8 + lane % 8, to_unit = 2 * warp + lane / 8 % 2;
    const int unit = thread % 8, from_row = thread / 8;
    const int64_t at = column + unit * 8;
#pragma unroll
    for (int first = 0; first < kN; first += S::kOutRows) {
      wait_for_stores();
      sync();
#pragma unroll
      for (int row = first; row < (first + S::kOutRows < kN ? first + S::kOutRows : kN); row += 16) {
        const float* from = d + row / 2;
        ptx::stmatrix_x4_trans(buffer + Lines::unit(row - first + to_row, to_unit), pack<Out>(from[0], from[1]),
                               pack<Out>(from[2], from[3]), pack<Out>(from[4], from[5]), pack<Out>(from[6], from[7]));
      }
      if (S::kStores) ptx::fence_proxy_async();
      sync();
      const int end = tile.rows - first < S::kOutRows ? tile.rows - first : S::kOutRows;
      if constexpr (S::kStores) {
        store(buffer, 128, column, first, end);
        const int row = end / kStoreRows * kStoreRows + from_row;
        if (row < end && at < p.n)
          *reinterpret_cast<uint4*>(static_cast<Out*>(p.out) + (tile.row + first + row) * settings.out_stride + at) =
              ptx::load_shared_16(buffer + Lines::unit(row, unit));
        continue;
      }
      if (at >= p.n) continue;
      const uint32_t lines = buffer + Lines::unit(from_row, unit);  // a step of 16 rows keeps the swizzle
      Out* out = static_cast<Out*>(p.out) + (tile.row + first + from_row) * settings.out_stride + at;
#pragma unroll 4
      for (int row = from_row; row < end; row += 16, out += 16 * settings.out_stride)
        *reinterpret_cast<uint4*>(out) = ptx::load_shared_16(lines + (row - from_row) * 128);
    }
  }

  // Store silu(gate) * linear: 32 columns from `first` on, 64 bytes of each token.
  template <int kN>
  __device__ __forceinline__ void store_gated(const float (&d)[kN / 2], int64_t first) const {
    using Out = typename S::Out;
    using Lines = ChunkedTile<kN, 64>;
    static_assert(kN * 64 <= S::kOutBytes || S::kFp8, "the buffer holds all tokens");
    const int lane = thread % 32, warp = thread / 32, unit = thread % 4, from_row = thread / 4;
    const bool gate_first = settings.gate == GemmGate::kGateFirst;
    const auto both = [&](const float* from) {
      return gate_first ? pack<Out>(gated(from[0], from[2]), gated(from[1], from[3]))
                        : pack<Out>(gated(from[2], from[0]), gated(from[3], from[1]));
    };
    wait_for_stores();
    sync();
#pragma unroll
    for (int row = 0; row < kN; row += 32) {
      const float* from = d + row / 2;
      uint32_t packed[4] = {};
#pragma unroll
      for (int i = 0; i < 4 && row + 8 * i < kN; ++i) packed[i] = both(from + 4 * i);
      ptx::stmatrix_x4_trans(buffer + Lines::unit(row + lane, warp), packed[0], packed[1], packed[2], packed[3]);
    }
    if (S::kStores) ptx::fence_proxy_async();
    sync();
    const int64_t at = first + unit * 8;
    if constexpr (S::kStores) {
      store(buffer, 64, first, 0, tile.rows);
      const int row = tile.rows / kStoreRows * kStoreRows + from_row;
      if (row < tile.rows && at < p.n / 2)
        *reinterpret_cast<uint4*>(static_cast<Out*>(p.out) + (tile.row + row) * settings.out_stride + at) =
            ptx::load_shared_16(buffer + Lines::unit(row, unit));
      return;
    }
    if (at >= p.n / 2) return;
    Out* out = static_cast<Out*>(p.out) + (tile.row + from_row) * settings.out_stride + at;
#pragma unroll 4
    for (int row = from_row; row < tile.rows; row += 32, out += 32 * settings.out_stride)
      *reinterpret_cast<uint4*>(out) = ptx::load_shared_16(buffer + Lines::unit(row, unit));
  }

  // Store any type at any alignment: float32 through smem, 16 or 32 tokens at a time, then element by
  // element.
  template <int kN>
  __device__ __forceinline__ void store_tokens_any(const float (&d)[kN / 2]) const {
    constexpr int kRows = kN < 32 || S::kFp8 ? 16 : 32,
                  kPitch = 68;  // floats per token; 68 avoids bank conflicts
    static_assert(kRows * kPitch * 4 <= S::kOutBytes, "the buffer holds kRows tokens");
    const int lane = thread % 32, weight = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int first = 0; first < kN; first += kRows) {
      sync();
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
        ptx::store_shared(buffer + (row * kPitch + weight + i / 2 % 2 * 8) * 4, __float_as_uint(d[first / 2 + i]));
      }
      sync();
      if (column + thread % 64 >= p.n) continue;
      const int end = tile.rows - first < kRows ? tile.rows - first : kRows;
#pragma unroll 1
      for (int row = thread / 64; row < end; row += 2)
        store_element(first + row, thread % 64, row * kPitch + thread % 64);
    }
  }

  // Store the accumulators of multiply_rows(): 64 tokens from `first` on, and all columns of a strip.
  __device__ __forceinline__ void store_strip(const StripSums& d, int first) const {
    const int rows = tile.rows - first < 64 ? tile.rows - first : 64;
    if (rows <= 0) return;  // uniform over the threads
    if (settings.lines) {
      store_strip_vectors(d, first, rows);
    } else {
      store_strip_any(d, first, rows);
    }
  }

 private:
  // Each warp stores 16 of the rows.
  __device__ __forceinline__ void store_strip_vectors(const StripSums& d, int from, int rows) const {
    using Out = typename S::Out;
    using Lines = ChunkedTile<64>;
    constexpr int kBuffers = S::kOutBytes / (64 * 128);
    const int lane = thread % 32, own = thread / 32 * 16, unit = lane % 8, row = own + lane / 8;
    Out* out = static_cast<Out*>(p.out) + (tile.row + from + row) * settings.out_stride + column + unit * 8;
#pragma unroll
    for (int first = 0; first < kGemmStrip; first += 64) {
      const int index = (from / 128 * 2 + first / 64) % kBuffers;  // buffers in flight
      const uint32_t buffer = this->buffer + index * 64 * 128;
      if (index == 0) wait_for_stores();
      __syncwarp();
      // stmatrix stores four 8 x 8 matrices, and each lane has the address of one row: tokens 0-7 and 8-15 of
      // 8 weights, then of the next 8 weights.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* sums = d + first / 2 + 8 * i;
        ptx::stmatrix_x4(buffer + Lines::unit(own + lane % 16, 2 * i + lane / 16), pack<Out>(sums[0], sums[1]),
                         pack<Out>(sums[2], sums[3]), pack<Out>(sums[4], sums[5]), pack<Out>(sums[6], sums[7]));
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (own + 16 <= rows) {
        if (lane == 0) {
          ptx::tma_store(&map, buffer + own * 128, static_cast<int>(column) + first, tile.row + from + own, 0);
          ptx::bulk_commit();
        }
        continue;
      }
      if (column + first + unit * 8 >= p.n) continue;
#pragma unroll
      for (int i = 0; i < 16; i += 4)
        if (row + i < rows)
          *reinterpret_cast<uint4*>(out + first + i * settings.out_stride) =
              ptx::load_shared_16(buffer + Lines::unit(row + i, unit));
    }
  }

  // Store any type at any alignment: float32 through smem, 16 weights at a time, then element by element.
  __device__ __forceinline__ void store_strip_any(const StripSums& d, int from, int rows) const {
    constexpr int kColumns = 16, kPitch = 20;  // floats per token
    static_assert(64 * kPitch * 4 <= S::kOutBytes, "the buffer holds 64 tokens");
    const int lane = thread % 32, to = thread / 32 * 16 + lane / 4, weight = thread % kColumns;
#pragma unroll
    for (int first = 0; first < kGemmStrip; first += kColumns) {
      sync();
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i)
        ptx::store_shared(buffer + ((to + i / 2 % 2 * 8) * kPitch + i / 4 * 8 + lane % 4 * 2 + i % 2) * 4,
                          __float_as_uint(d[first / 2 + i]));
      sync();
      if (column + first + weight >= p.n) continue;
#pragma unroll 1
      for (int row = thread / kColumns; row < rows; row += 128 / kColumns)
        store_element(from + row, first + weight, row * kPitch + weight);
    }
  }

  static __device__ __forceinline__ float gated(float gate, float linear) {
    return __fdividef(gate, 1.0f + __expf(-gate)) * linear;
  }

  // Wait until TMA stores have read the buffer. The first lane of each warp issues the stores and waits for
  // them.
  __device__ __forceinline__ void wait_for_stores() const {
    if (S::kStores && thread % 32 == 0) ptx::bulk_wait_read<0>();
  }

  // Store whole groups of kStoreRows tokens by TMA, from token `first` of the tile on. A token has `bytes`
  // bytes in smem.
  __device__ __forceinline__ void store(uint32_t from, int bytes, int64_t to, int first, int rows) const {
    if (thread % 32) return;
#pragma unroll 1
    for (int row = thread / 32 * kStoreRows; row + kStoreRows <= rows; row += 4 * kStoreRows)
      ptx::tma_store(&map, from + row * bytes, static_cast<int>(to), tile.row + first + row, 0);
    ptx::bulk_commit();
  }

  __device__ __forceinline__ void sync() const { ptx::named_barrier<128>(1 + group); }

  __device__ __forceinline__ void store_element(int row, int weight, int offset) const {
    float value = ptx::load_shared_float(buffer + offset * 4);
    const int64_t at_row = tile.row + row;
    if (p.row_scale) value *= p.row_scale[at_row];
    const int64_t at = at_row * settings.out_stride + column + weight;
    if (p.out_dtype == DType::kFloat32) {
      static_cast<float*>(p.out)[at] = value;
    } else if (p.out_dtype == DType::kFloat16) {
      static_cast<half_t*>(p.out)[at] = from_float<half_t>(value);
    } else {
      static_cast<bfloat16_t*>(p.out)[at] = from_float<bfloat16_t>(value);
    }
  }
};

}  // namespace flashinfer::cuda::sm90
