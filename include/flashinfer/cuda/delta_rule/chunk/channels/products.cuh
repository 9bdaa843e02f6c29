// Matrix products of the gradients with a decay per channel. A warp has 16 rows and half of the channels.
//
// This file computes the terms between blocks of 16 rows. The rows of q and k contain the decay from or to
// the border of their block. Each further block multiplies the sums by its decay. channels/gradients.cuh adds
// the terms within a block.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/backward/slice.cuh>
#include <flashinfer/cuda/delta_rule/chunk/channels/prepare.cuh>

namespace flashinfer::cuda {

template <typename T_, int kKeys_>
struct DeltaChannelGradientShape {
  using T = T_;
  using Products = DeltaWarpGradients<T, kKeys_>;
  static constexpr bool kWgmma = false;
  static constexpr int kParts = 1;
  static constexpr int kKeys = kKeys_, kThreads = 256, kSlice = 64;  // columns at a time
};

template <typename Shape>
struct DeltaChannelGradientsShared {
  static constexpr int kKeys = Shape::kKeys, kBlocks = kDeltaChunk / 16;
  static constexpr int kParts = Shape::kThreads / (2 * kKeys);  // sets of threads that cover all channels of a state
  using Rows = typename Shape::Products::Rows;
  using Sums = float[kDeltaChunk][kKeys + 8];

  alignas(1024) Rows k;
  Rows q;
  union {
    struct {
      DeltaGradientStage<Shape> stage;
      Rows read_k, read_q;  // times the decays from the start of the block to the row
      Rows update_k;        // k times the decays from the row to the end of the block
    };
    struct {
      Sums dq, dk_row, dk_col;  // later dk_row is dk, and dk_col the terms of dg
    };
  };
  typename Shape::Products::Matrix p, x;  // dP, and X
  DeltaGradientFactors factors;
  float block_decay[kBlocks][kKeys];  // decay over all rows of a block
  float written[kBlocks][kKeys];      // <k, u D'> with the decays from the row to the end of the block
  float product[kParts][kKeys];       // <D, S>
  float after[kBlocks][kKeys];        // part of dg that a block adds to all earlier rows
  DeltaBackwardWorkspace workspace;
  GradientGrid grid;
};

template <typename Shape>
struct DeltaChannelProducts : DeltaGradientSlices<Shape> {
  using Base = DeltaGradientSlices<Shape>;
  using T = typename Shape::T;
  using Products = typename Shape::Products;
  using Shared = DeltaChannelGradientsShared<Shape>;
  using Rows = typename Shared::Rows;
  using GradientSums = typename Products::Sums;
  using Sums = typename GradientSums::Keys;
  using Cursor = GradientCursor;
  static constexpr int kKeys = Shape::kKeys, kThreads = Shape::kThreads, kBlocks = Shared::kBlocks;
  using Base::half, Base::lane, Base::row, Base::rows, Base::thread;
  using Base::p, Base::in, Base::grid, Base::workspace, Base::pair_of;

  Shared& shared;

  __device__ __forceinline__ DeltaChannelProducts(const DeltaRuleBackwardParams& params, Shared& memory)
      : Base(params, memory.grid, memory.workspace), shared(memory) {}

  // Issue copies: load_keys() of q and k, load_factors() of a value head's factors.
  __device__ __forceinline__ void load_keys(const Cursor& at) const {
    copy_keys(shared.k, in.k, in.k_strides, at), copy_keys(shared.q, in.q, in.q_strides, at);
  }
  __device__ __forceinline__ void load_factors(const Cursor& at) const {
    const auto& terms = static_cast<const DeltaChannelTerms<kKeys>*>(workspace.terms)[at.index(in, grid)];
    const auto& factors = static_cast<const DeltaGradientFactors&>(terms);
    if (thread < sizeof(factors) / 16)
      ptx::cp_async_16(ptx::shared_address(&shared.factors) + thread * 16,
                       reinterpret_cast<const char*>(&factors) + thread * 16);
  }
  // Add a slice of columns and its part of <D, S>. A thread has eight channels of state blocks.
  __device__ __forceinline__ void add_slice(const Cursor& at, GradientSums& sums, float (&product)[8]) const {
    auto& stage = shared.stage;
    __syncthreads();  // all threads have read the previous slice
    this->load_slice(stage, at);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    Products::add_slice(stage, sums, at.slice == 0);
    this->store_values(stage.grad_y, at, shared.factors.beta);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(stage.state)) / 16 / kThreads; ++i) {
      const uint4 state = (&stage.state[0][0][thread])[i * kThreads], grad = (&stage.grad[0][0][thread])[i * kThreads];
      const uint32_t states[4] = {state.x, state.y, state.z, state.w}, grads[4] = {grad.x, grad.y, grad.z, grad.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float a[2], b[2];
        unpack<T>(states[e], a[0], a[1]), unpack<T>(grads[e], b[0], b[1]);
        product[2 * e] += a[0] * b[0], product[2 * e + 1] += a[1] * b[1];
      }
    }
  }
  // Finish the products of a value head after its slices, and move the sums to smem.
  __device__ __forceinline__ void finish_products(const Cursor& at, float scale, GradientSums& sums,
                                                  float (&product)[8]) const {
    this->store_local(shared.p, shared.x, shared.factors, sums.local, scale);
    if (half && p.grad_beta) this->store_betas(at, sums.local);
    this->scale_sums(sums, shared.factors);
    const int warp = thread / 32;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
#pragma unroll
      for (int by = 1; by < 16; by *= 2) product[e] += __shfl_xor_sync(kAllLanes, product[e], by);
    }
    if (lane % 16 == 0)
      store_floats(&shared.product[warp / (kKeys / 16)][warp % (kKeys / 16) * 16 + lane / 16 * 8], product);
#pragma unroll
    for (int n = 0; n < Sums::kN; ++n) {
      const float2 upper = pair_of(shared.update_k, n, 0), lower = pair_of(shared.update_k, n, 1);
      const auto& col = sums.dk_col[0][n];
      float first = upper.x * col[0] + lower.x * col[2], second = upper.y * col[1] + lower.y * col[3];
#pragma unroll
      for (int by = 4; by < 32; by *= 2) {
        first += __shfl_xor_sync(kAllLanes, first, by), second += __shfl_xor_sync(kAllLanes, second, by);
      }
      if (lane < 4) {
        float* to = &shared.written[rows][half * (kKeys / 2) + 8 * n + 2 * lane];
        to[0] = first, to[1] = second;
      }
    }
    __syncthreads();
    add_blocks(sums);
    __syncthreads();
    put(shared.dq, sums.dq), put(shared.dk_row, sums.dk_row), put(shared.dk_col, sums.dk_col);
    __syncthreads();
  }

 private:
  __device__ __forceinline__ void copy_keys(Rows& to, const void* from, const TokenStrides& strides,
                                            const Cursor& at) const {
    copy_tokens<T, 2 * kKeys, kThreads, kDeltaChunk>(ptx::shared_address(to), from, strides, at.chunk, at.qk_head, 0,
                                                     in.key_dim, thread);
  }
  // Add the terms between blocks, and multiply by the decays of whole blocks.
  __device__ __forceinline__ void add_blocks(GradientSums& sums) const {
    using Summed = SmemOperandBTransposed<2 * kKeys, kDeltaChunk>;
    constexpr int kPairs = kKeys / 32;
    const Summed update_k(ptx::shared_address(shared.update_k), 0);
    const Summed read_k(ptx::shared_address(shared.read_k), 0), read_q(ptx::shared_address(shared.read_q), 0);
    const int first = half * (kKeys / 16);
#pragma unroll
    for (int m = 0; m < kBlocks - 1; ++m) {
      if (m >= rows) continue;
      uint32_t p_block[1][4], x_block[1][4], b[2][2];
      load_block_a<false>(p_block[0], ptx::shared_address(shared.p[DeltaMatrices::block(rows, m)]));
      load_block_a<false>(x_block[0], ptx::shared_address(shared.x[DeltaMatrices::block(rows, m)]));
      scale_channels(sums.dq, shared.block_decay[m]), scale_channels(sums.dk_row, shared.block_decay[m]);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        update_k.load(b, m, first + 2 * pair);
        sums.dq.template add<T>(p_block, b, pair), sums.dk_row.template add<T>(x_block, b, pair);
      }
    }
#pragma unroll
    for (int m = kBlocks - 1; m > 0; --m) {
      if (m <= rows) continue;
      uint32_t p_block[1][4], x_block[1][4], b[2][2];
      load_block<true>(p_block[0], ptx::shared_address(shared.p[DeltaMatrices::block(m, rows)]));
      load_block<true>(x_block[0], ptx::shared_address(shared.x[DeltaMatrices::block(m, rows)]));
      scale_channels(sums.dk_col, shared.block_decay[m]);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        read_q.load(b, m, first + 2 * pair);
        sums.dk_col.template add<T>(p_block, b, pair);
        read_k.load(b, m, first + 2 * pair);
        sums.dk_col.template add<T>(x_block, b, pair);
      }
    }
  }
  __device__ __forceinline__ void scale_channels(Sums& sums, const float (&factors)[kKeys]) const {
#pragma unroll
    for (int n = 0; n < Sums::kN; ++n) {
      const float2 by = *reinterpret_cast<const float2*>(&factors[half * (kKeys / 2) + 8 * n + 2 * (lane % 4)]);
      sums[0][n][0] *= by.x, sums[0][n][1] *= by.y, sums[0][n][2] *= by.x, sums[0][n][3] *= by.y;
    }
  }
  __device__ __forceinline__ void put(typename Shared::Sums& to, const Sums& sums) const {
#pragma unroll
    for (int n = 0; n < Sums::kN; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<float2*>(&to[row() + 8 * i][half * (kKeys / 2) + 8 * n + 2 * (lane % 4)]) =
            make_float2(sums[0][n][2 * i], sums[0][n][2 * i + 1]);
    }
  }
};

}  // namespace flashinfer::cuda
