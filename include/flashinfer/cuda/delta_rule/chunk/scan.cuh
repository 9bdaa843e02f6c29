// Base of the scans over the chunks of a value head.
//
// A warp holds 16 columns of the state, transposed, as accumulators. Packed accumulators have the layout of A
// operands, so a warp multiplies its state without smem. Two scans put packed copies of states into smem: for
// a second warpgroup (forward/split_warpgroups.cuh), and for bulk copies to gmem (gradients on wgmma). Warps
// of a CTA share tiles of q, k and v, and the terms of the chunk. Copies of the next chunks overlap the
// computation of one chunk.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/shape.cuh>
#include <flashinfer/cuda/delta_rule/columns.cuh>
#include <flashinfer/cuda/ptx/movmatrix.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/ptx/stmatrix.cuh>
#include <flashinfer/cuda/ptx/tma.cuh>

namespace flashinfer::cuda {

template <typename Shape>
struct DeltaScan {
  using T = typename Shape::T;
  using Products = typename Shape::Products;
  using State = typename Products::State;
  using TokenAccumulators = DeltaSums16;  // columns x tokens
  using OperandA = DeltaOperandA;
  using StateOperandA = DeltaStateOperandA<Shape::kPartKeys>;
  static constexpr int kSteps = kDeltaChunk / 16;

  const DeltaRuleInputs& in;
  const DeltaWork work;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int part = 0;

  __device__ __forceinline__ explicit DeltaScan(const DeltaRuleInputs& inputs, uint32_t number = blockIdx.x)
      : in(inputs), work(inputs, Shape::kColumns, number) {
    if constexpr (Shape::kParts > 1) part = warp / Shape::kPartWarps, warp -= part * Shape::kPartWarps;
  }

  __device__ __forceinline__ bool computes() const { return part * Shape::kPartWarps + warp < Shape::kWarps; }
  // Return the index of this thread among the threads that issue copies.
  __device__ __forceinline__ int copy_thread() const { return threadIdx.x - (Shape::kThreads - Shape::kCopiers); }
  __device__ __forceinline__ int64_t num_chunks() const {
    return (work.tokens.end - work.tokens.begin + kDeltaChunk - 1) / kDeltaChunk;
  }
  __device__ __forceinline__ DeltaChunk chunk(int64_t number) const { return {work.tokens, number}; }
  // Index of a chunk and this value head among all chunks and value heads.
  __device__ __forceinline__ int64_t index(int64_t number) const {
    return (first_chunk(in, work.sequence) + number) * in.num_value_heads + work.value_head;
  }
  // The gradients' workspace stores packed states as strips of 16 columns, kKeys / 16 blocks each. Return the
  // index of this warp's first block of a strip.
  __device__ __forceinline__ int64_t state_block(int64_t strip) const {
    return strip * (Shape::kKeys / 16) + part * (Shape::kPartKeys / 16);
  }
  // Return the first of this warp's columns.
  __device__ __forceinline__ int64_t column() const { return work.slice * Shape::kColumns + 16 * warp; }

  __device__ __forceinline__ void copy_keys(typename Shape::Keys& to, const void* rows, const TokenStrides& strides,
                                            const DeltaChunk& chunk, int64_t from = 0) const {
    copy_tokens<T, Shape::kKeyBytes, Shape::kCopiers, kDeltaChunk>(ptx::shared_address(to), rows, strides, chunk,
                                                                   work.key_head, from, in.key_dim, copy_thread());
  }
  __device__ __forceinline__ void copy_keys(typename Shape::Keys (&to)[2], const void* rows,
                                            const TokenStrides& strides, const DeltaChunk& chunk) const {
    copy_keys(to[0], rows, strides, chunk), copy_keys(to[1], rows, strides, chunk, Shape::kPartKeys);
  }
  // Copy rows of the workspace, which exist for all 64 tokens and all keys.
  __device__ __forceinline__ void copy_rows(typename Shape::Keys& to, const typename Shape::Keys& from) const {
    copy_tokens<T, Shape::kKeyBytes, Shape::kCopiers, kDeltaChunk>(ptx::shared_address(to), from, {0, Shape::kKeys, 0},
                                                                   {{0, 0, kDeltaChunk}, 0}, 0, 0, Shape::kKeys,
                                                                   copy_thread());
  }
  template <typename Stage>
  __device__ __forceinline__ void load_keys(Stage& to, const typename Shape::ChunkTerms& chunk_terms,
                                            const DeltaChunk& chunk) const {
    if constexpr (Shape::kChannels) {
      copy_rows(to.k, chunk_terms.k), copy_rows(to.update_k, chunk_terms.update);
      copy_bytes(to.decay, chunk_terms.decay, sizeof(to.decay));
    } else {
      copy_keys(to.k, in.k, in.k_strides, chunk);
    }
  }
  template <typename Stage>
  __device__ __forceinline__ void load_queries(Stage& to, const typename Shape::ChunkTerms& chunk_terms,
                                               const DeltaChunk& chunk) const {
    if constexpr (Shape::kChannels) {
      copy_rows(to.q, chunk_terms.q);
    } else {
      copy_keys(to.q, in.q, in.q_strides, chunk);
    }
  }
  // Return this warp's part of the keys of a tile.
  __device__ __forceinline__ const typename Shape::Keys& key_part(const typename Shape::Keys& tile) const {
    return tile;
  }
  __device__ __forceinline__ const typename Shape::Keys& key_part(const typename Shape::Keys (&tiles)[2]) const {
    return tiles[part];
  }
  __device__ __forceinline__ void copy_values(typename Shape::Values& to, const void* rows, const TokenStrides& strides,
                                              const DeltaChunk& chunk) const {
    copy_tokens<T, Shape::kValueBytes, Shape::kCopiers>(ptx::shared_address(to), rows, strides, chunk, work.value_head,
                                                        work.slice * Shape::kColumns, in.value_dim, copy_thread());
  }
  // Copy `bytes` contiguous bytes, a multiple of 16.
  __device__ __forceinline__ void copy_bytes(void* to, const void* from, uint32_t bytes) const {
    const uint32_t start = ptx::shared_address(to);
    for (uint32_t i = copy_thread() * 16; i < bytes; i += Shape::kCopiers * 16)
      ptx::cp_async_16(start + i, static_cast<const char*>(from) + i);
  }
  __device__ __forceinline__ void copy_terms(DeltaScanTerms& to, const DeltaTerms& from) const {
    copy_bytes(&to, &from, sizeof(DeltaScanTerms));
  }
  template <typename Matrices>
  __device__ __forceinline__ void copy_terms(DeltaTileTerms<Matrices>& to, const DeltaTerms& from) const {
    copy_blocks(to.z, from.z);
    if constexpr (sizeof(Matrices) > sizeof(to.z)) copy_blocks(to.p, from.p);
    copy_bytes(to.k_decay, from.k_decay, sizeof(DeltaFactors));
  }

  // Call body(element, i) for each of a lane's elements of the state. i is the index in a tensor of states.
  template <typename Body>
  __device__ __forceinline__ void for_state_elements(State& state, const Body& body) const {
    const int64_t start = work.head_index(in) * in.state_size(), first = column() + lane / 4;
#pragma unroll
    for (int n = 0; n < Shape::kPartKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = part * Shape::kPartKeys + 8 * n + 2 * (lane % 4) + i % 2, v = first + i / 2 * 8;
        if (row < in.key_dim && v < in.value_dim)
          body(state[0][n][i], start + row * in.row_stride() + v * in.column_stride());
      }
    }
  }

  // Multiply a state by the decay of a chunk.
  template <typename Stage>
  __device__ __forceinline__ void decay(State& state, const Stage& stage) const {
    if constexpr (Shape::kChannels) {
#pragma unroll
      for (int n = 0; n < Shape::kKeys / 8; ++n) {
        const float2 factor = *reinterpret_cast<const float2*>(&stage.decay[8 * n + 2 * (lane % 4)]);
        state[0][n][0] *= factor.x, state[0][n][1] *= factor.y, state[0][n][2] *= factor.x, state[0][n][3] *= factor.y;
      }
    } else {
      state.scale(stage.terms.chunk_decay[0]);
    }
  }
  // Return the factors of the two tokens that the lane has in accumulator tile n.
  __device__ __forceinline__ float2 token_factors(const float (&factors)[kDeltaChunk], int n) const {
    return *reinterpret_cast<const float2*>(&factors[8 * n + 2 * (lane % 4)]);
  }
  __device__ __forceinline__ void scale_tokens(TokenAccumulators& sums, int m,
                                               const float (&factors)[kDeltaChunk]) const {
#pragma unroll
    for (int n = 2 * m; n < 2 * m + 2; ++n) {
      const float2 factor = token_factors(factors, n);
      sums[0][n][0] *= factor.x, sums[0][n][1] *= factor.y, sums[0][n][2] *= factor.x, sums[0][n][3] *= factor.y;
    }
  }
  // Pack tokens 16 m to 16 m + 15 times their factors as an A operand.
  __device__ __forceinline__ void pack_scaled(uint32_t (&a)[4], const TokenAccumulators& sums, int m,
                                              const float (&factors)[kDeltaChunk], float sign = 1.f) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 factor = token_factors(factors, 2 * m + half);
      const auto& accumulator = sums[0][2 * m + half];
      const float x = sign * factor.x, y = sign * factor.y;
      a[2 * half] = pack<T>(accumulator[0] * x, accumulator[1] * y),
            a[2 * half + 1] = pack<T>(accumulator[2] * x, accumulator[3] * y);
    }
  }
  __device__ __forceinline__ void pack_scaled(OperandA& operand, const TokenAccumulators& sums,
                                              const float (&factors)[kDeltaChunk]) const {
#pragma unroll
    for (int m = 0; m < kSteps; ++m) pack_scaled(operand[m], sums, m, factors);
  }
  // Pack a state as an A operand.
  __device__ __forceinline__ static void pack_state(StateOperandA& a, const State& state) {
#pragma unroll
    for (int step = 0; step < Shape::kPartKeys / 16; ++step)
      pack_operand_a<T>(a[step], state[0][2 * step], state[0][2 * step + 1]);
  }
  // Load this warp's columns and tokens 16 m to 16 m + 15 of a tile [tokens, columns] as an A operand.
  __device__ __forceinline__ void load_values(uint32_t (&a)[4], const typename Shape::Values& tile, int m) const {
    uint32_t b[2][2];
    SmemOperandBTransposed<Shape::kValueBytes>(ptx::shared_address(tile), 0).load(b, m, 2 * warp);
    a[0] = b[0][0], a[1] = b[1][0], a[2] = b[0][1], a[3] = b[1][1];
  }
  __device__ __forceinline__ void load_values(OperandA& operand, const typename Shape::Values& tile) const {
#pragma unroll
    for (int m = 0; m < kSteps; ++m) load_values(operand[m], tile, m);
  }
  // Multiply loaded values by the factors of their tokens.
  __device__ __forceinline__ void scale_values(OperandA& operand, const float (&factors)[kDeltaChunk]) const {
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 factor = token_factors(factors, 2 * m + i / 2);
        float low, high;
        unpack<T>(operand[m][i], low, high);
        operand[m][i] = pack<T>(low * factor.x, high * factor.y);
      }
    }
  }
  // Add the sums of all key parts, exchanged through smem. kForAll: every part receives the total, else only
  // part 0.
  template <bool kForAll>
  __device__ __forceinline__ void reduce_key_parts(DeltaSums16& sums, DeltaPartSums<Shape>* part_sums) const {
    if constexpr (Shape::kParts > 1) {
      constexpr int kWarps = Shape::kPartWarps, kTiles = Shape::kPartTokens / 8;
#pragma unroll
      for (int first = 0; first < DeltaSums16::kN; first += kTiles) {
        ptx::named_barrier<32 * Shape::kWarps>(1);  // the previous sums have been read
        if (kForAll || part > 0) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const auto& accumulator = sums[0][first + n];
            *reinterpret_cast<float4*>(&(*part_sums)[warp + part * kWarps][n][lane]) =
                make_float4(accumulator[0], accumulator[1], accumulator[2], accumulator[3]);
          }
        }
        ptx::named_barrier<32 * Shape::kWarps>(1);
        if (kForAll || part == 0) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const float4 other = *reinterpret_cast<const float4*>(&(*part_sums)[warp + (1 - part) * kWarps][n][lane]);
            auto& accumulator = sums[0][first + n];
            accumulator[0] += other.x, accumulator[1] += other.y, accumulator[2] += other.z, accumulator[3] += other.w;
          }
        }
      }
    }
  }

  // Turn K S into R = V - e^G K S, for tokens 16 m to 16 m + 15 or for all.
  __device__ __forceinline__ void subtract_from_values(TokenAccumulators& r, const uint32_t (&v)[4], int m,
                                                       const float (&factors)[kDeltaChunk]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto& sums = r[0][2 * m + half];
      const float2 factor = token_factors(factors, 2 * m + half);
      float rows[4];
      unpack<T>(v[2 * half], rows[0], rows[1]), unpack<T>(v[2 * half + 1], rows[2], rows[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = rows[i] - sums[i] * (i % 2 ? factor.y : factor.x);
    }
  }
  __device__ __forceinline__ void subtract_from_values(TokenAccumulators& r, const OperandA& v,
                                                       const float (&factors)[kDeltaChunk]) const {
#pragma unroll
    for (int m = 0; m < kSteps; ++m) subtract_from_values(r, v[m], m, factors);
  }
  __device__ __forceinline__ void subtract_from_values(TokenAccumulators& r, const typename Shape::Values& v,
                                                       const float (&factors)[kDeltaChunk]) const {
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t a[4];
      load_values(a, v, m), subtract_from_values(r, a, m, factors);
    }
  }

  // Turn K S into r = R - Z (B R). With wgmma, the last product is still in flight and reads `operand`: the
  // caller waits for it.
  template <typename Terms>
  __device__ __forceinline__ void finish_residuals(TokenAccumulators& r, OperandA& operand, const OperandA& v,
                                                   const Terms& terms) const {
    subtract_from_values(r, v, terms.k_decay);
    pack_scaled(operand, r, terms.beta);
    Products::template multiply<true>(r, operand, terms.z);
  }

  // Store to a contiguous tensor [B, T, HV, V], staged in this warp's part of a tile that the warp no longer
  // reads. kFewRegisters: the compiler computes the row addresses here instead of before the loop, so they
  // take no registers from the accumulators.
  template <bool kFewRegisters = true>
  __device__ __forceinline__ void store(void* to, typename Shape::Values& tile, const DeltaChunk& chunk,
                                        const TokenAccumulators& o) const {
    store<kFewRegisters>(to, tile, chunk,
                         [&o](uint32_t (&four)[4], int m) { pack_operand_a<T>(four, o[0][2 * m], o[0][2 * m + 1]); });
  }
  // Store A operands. fill(a, m) sets the operand of tokens 16 m to 16 m + 15.
  template <bool kFewRegisters, typename Fill>
  __device__ __forceinline__ void store(void* to, typename Shape::Values& tile, const DeltaChunk& chunk,
                                        const Fill& fill) const {
    using Rows = Swizzle<Shape::kValueBytes>;
    uint32_t start = ptx::shared_address(tile);
    if constexpr (kFewRegisters) asm volatile("" : "+r"(start));
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t four[4];
      fill(four, m);
      if constexpr (Shape::kWgmma && Shape::kColumns == 64) {
        const uint32_t row = Rows::row(start, 16 * m + lane / 16 * 8 + lane % 8);
        ptx::stmatrix_x4_trans(Rows::chunk(row, 2 * warp + lane / 8 % 2), four[0], four[1], four[2], four[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t row = Rows::row(start, 16 * m + i / 2 * 8 + lane / 4);
          ptx::store_shared(Rows::chunk(row, 2 * warp + i % 2) + lane % 4 * 4, ptx::movmatrix_trans(four[i]));
        }
      }
    }
    __syncwarp();
    const int64_t v = column() + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < kDeltaChunk / 16; ++i) {
      const int token = 16 * i + lane / 2;
      const uint4 eight = ptx::load_shared_16(Rows::chunk(Rows::row(start, token), 2 * warp + lane % 2));
      if (token < chunk.count && v < in.value_dim)
        *reinterpret_cast<uint4*>(static_cast<T*>(to) + work.token_index(in, chunk.first + token) * in.value_dim + v) =
            eight;
    }
  }

  // Return a functor that stores block i to gmem. A warp calls it next to the products with block i, because
  // a burst of stores would stall the next loads.
  template <int kCount>
  __device__ __forceinline__ static auto block_writer(char* to, const uint32_t (&r)[kCount][4], bool writes) {
    return [to, &r, writes](int i) {
      if (writes) store_block(to + i * sizeof(DeltaBlock16), r[i]);
    };
  }
  // Store blocks through `staging`, smem of this warp, and a bulk copy. The last kPending bulk copies read
  // other smem and may be in flight.
  template <int kPending, int kCount>
  __device__ __forceinline__ void store_blocks(char* to, DeltaBlock16* staging, const uint32_t (&r)[kCount][4],
                                               bool writes) const {
    const uint32_t start = ptx::shared_address(staging);
    ptx::bulk_wait_read<kPending>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      ptx::stmatrix_x4(start + i * sizeof(DeltaBlock16) + lane * 16, r[i][0], r[i][1], r[i][2], r[i][3]);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0 && writes) ptx::bulk_store(to, start, kCount * sizeof(DeltaBlock16));
    ptx::bulk_commit();
  }

 private:
  // Copy the blocks on and below the diagonal to their positions in a tile.
  __device__ __forceinline__ void copy_blocks(DeltaTileMatrix& to, const DeltaMatrices::Matrix& from) const {
    const uint32_t start = ptx::shared_address(to);
    for (int i = copy_thread(); i < DeltaMatrices::kBlocks * 32; i += Shape::kCopiers) {
      const int block = i / 32, m = (block >= 1) + (block >= 3) + (block >= 6), row = 16 * m + i % 32 / 16 * 8 + i % 8;
      const int unit = 2 * (block - DeltaMatrices::block(m, 0)) + i / 8 % 2;
      ptx::cp_async_16(start + ChunkedTile<kDeltaChunk>::unit(row, unit), &from[0][0] + i);
    }
  }
};

}  // namespace flashinfer::cuda
