// The second kernel of the delta rule over chunks: the states of a value head one behind the other, and the outputs. A
// warp has 16 columns of the state, transposed, as sums in registers, which are left operands as they are: nothing of a
// state is in shared memory, and warps of a block share tiles of K and Q, -Z and P alone. Two chunks have tiles: one is
// on its way while the other is computed.
#pragma once

#include <flashinfer/cuda/delta_chunk.cuh>
#include <flashinfer/cuda/delta_columns.cuh>
#include <flashinfer/cuda/ptx/movmatrix.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>

namespace flashinfer::cuda {

// Of a block: kWarps warps compute, kLoaders more start copies; none of them: all do.
template <typename T_, int kKeys_, int kWarps_, int kLoaders_>
struct DeltaChainShape {
  using T = T_;
  static constexpr int kKeys = kKeys_, kWarps = kWarps_, kLoaders = kLoaders_, kColumns = 16 * kWarps;
  static constexpr int kThreads = 32 * (kWarps + kLoaders), kCopiers = kLoaders ? 32 * kLoaders : kThreads;
  static constexpr int kKeyBytes = 2 * kKeys, kValueBytes = 2 * kColumns;

  struct alignas(128) Stage {
    uint4 k[kDeltaChunk][kKeyBytes / 16], q[kDeltaChunk][kKeyBytes / 16];
    uint4 v[kDeltaChunk][kValueBytes / 16];  // then o
    DeltaTerms terms;
  };
  static constexpr int kSharedBytes = 2 * sizeof(Stage);
};

template <typename Shape>
struct DeltaChain {
  using T = typename Shape::T;
  using Stage = typename Shape::Stage;
  using State = Accumulator<16, Shape::kKeys>;
  using Sums = Accumulator<16, kDeltaChunk>;
  static constexpr int kSteps = kDeltaChunk / 16;

  const DeltaRuleParams& p;
  const DeltaRuleInputs& in;
  const DeltaBlock block;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ __forceinline__ explicit DeltaChain(const DeltaRuleParams& params)
      : p(params), in(params.in), block(params.in, Shape::kColumns) {}

  __device__ __forceinline__ bool computes() const { return warp < Shape::kWarps; }

  // Starts copies of what a chunk needs; the last kCopiers threads call this.
  __device__ __forceinline__ void load(Stage& to, int64_t number) const {
    const int thread = threadIdx.x - (Shape::kThreads - Shape::kCopiers);
    const DeltaChunk chunk(block.tokens, number);
    const int64_t head = block.value_head / in.group();
    copy_tokens<T, Shape::kKeyBytes, Shape::kCopiers>(ptx::shared_address(to.k), in.k, in.k_strides, chunk, head, 0,
                                                      in.key_dim, thread);
    copy_tokens<T, Shape::kKeyBytes, Shape::kCopiers>(ptx::shared_address(to.q), in.q, in.q_strides, chunk, head, 0,
                                                      in.key_dim, thread);
    copy_tokens<T, Shape::kValueBytes, Shape::kCopiers>(ptx::shared_address(to.v), in.v, in.v_strides, chunk,
                                                        block.value_head, block.slice * Shape::kColumns, in.value_dim,
                                                        thread);
    const int64_t at = (first_chunk(in, block.sequence) + number) * in.num_value_heads + block.value_head;
    const auto* from = reinterpret_cast<const char*>(static_cast<const DeltaTerms*>(p.workspace) + at);
    const uint32_t terms = ptx::shared_address(&to.terms);
    for (uint32_t i = thread * 16; i < sizeof(DeltaTerms); i += Shape::kCopiers * 16)
      ptx::cp_async_16(terms + i, from + i);
    ptx::cp_async_commit();
  }

  // Calls body(one, i) for each of a lane's elements of the state, element i of a tensor of states.
  template <typename Body>
  __device__ __forceinline__ void for_state(State& state, const Body& body) const {
    const int64_t start = block.head(in) * in.state_size();
    const int64_t column = block.slice * Shape::kColumns + 16 * warp + lane / 4;
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = 8 * n + 2 * (lane % 4) + i % 2, v = column + i / 2 * 8;
        if (row < in.key_dim && v < in.value_dim)
          body(state[0][n][i], start + row * in.row_stride() + v * in.column_stride());
      }
    }
  }

  __device__ __forceinline__ void advance(Stage& stage, const DeltaChunk& chunk, State& state) const {
    const DeltaTerms& terms = stage.terms;
    Sums r, o;
    r.clear(), o.clear();
    {
      const RightRows<Shape::kKeyBytes> keys(ptx::shared_address(stage.k), 0), queries(ptx::shared_address(stage.q), 0);
#pragma unroll
      for (int step = 0; step < Shape::kKeys / 16; ++step) {
        uint32_t a[1][4];
        pack_left<T>(a[0], state[0][2 * step], state[0][2 * step + 1]);
#pragma unroll
        for (int pair = 0; pair < kSteps; ++pair) {
          uint32_t b[2][2];
          keys.load(b, pair, step), r.template add<T>(a, b, pair);
          queries.load(b, pair, step), o.template add<T>(a, b, pair);
        }
      }
    }
    uint32_t left[kSteps][1][4];  // B r, then u
    const SummedRows<Shape::kValueBytes> values(ptx::shared_address(stage.v), 0);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t v[2][2];
      values.load(v, m, 2 * warp);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        auto& sums = r[0][2 * m + half];
        const float2 read = of_tokens(terms.read, 2 * m + half);
        float rows[4];
        unpack<T>(v[0][half], rows[0], rows[1]), unpack<T>(v[1][half], rows[2], rows[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = rows[i] - sums[i] * (i % 2 ? read.y : read.x);
      }
      scaled(left[m][0], r, m, terms.beta);
    }
    multiply(r, left, terms.z);
    const float last = terms.last[0];
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      scale_tokens(o, m, terms.out), scale_tokens(r, m, terms.beta);
      pack_left<T>(left[m][0], r[0][2 * m], r[0][2 * m + 1]);
    }
    multiply(o, left, terms.p);
    state.scale(last);
    const SummedRows<Shape::kKeyBytes> rows(ptx::shared_address(stage.k), 0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[1][4];
      scaled(a[0], r, step, terms.write);
#pragma unroll
      for (int pair = 0; pair < Shape::kKeys / 16; ++pair) {
        uint32_t b[2][2];
        rows.load(b, step, 2 * pair), state.template add<T>(a, b, pair);
      }
    }
    store(stage, chunk, o);
  }

 private:
  // Factors of a lane's two tokens of tile n.
  __device__ __forceinline__ float2 of_tokens(const float (&factors)[kDeltaChunk], int n) const {
    return *reinterpret_cast<const float2*>(&factors[8 * n + 2 * (lane % 4)]);
  }
  __device__ __forceinline__ void scale_tokens(Sums& sums, int m, const float (&factors)[kDeltaChunk]) const {
#pragma unroll
    for (int n = 2 * m; n < 2 * m + 2; ++n) {
      const float2 by = of_tokens(factors, n);
      sums[0][n][0] *= by.x, sums[0][n][1] *= by.y, sums[0][n][2] *= by.x, sums[0][n][3] *= by.y;
    }
  }
  // Tokens 16 m to 16 m + 15 times their factors as a left operand.
  __device__ __forceinline__ void scaled(uint32_t (&a)[4], const Sums& sums, int m,
                                         const float (&factors)[kDeltaChunk]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 by = of_tokens(factors, 2 * m + half);
      const auto& of = sums[0][2 * m + half];
      a[2 * half] = pack<T>(of[0] * by.x, of[1] * by.y), a[2 * half + 1] = pack<T>(of[2] * by.x, of[3] * by.y);
    }
  }
  // sums += left times a matrix of blocks on and below the diagonal, transposed.
  __device__ __forceinline__ void multiply(Sums& sums, const uint32_t (&left)[kSteps][1][4],
                                           const uint4 (&blocks)[DeltaTerms::kBlocks][32]) const {
#pragma unroll
    for (int column = 0; column < kSteps; ++column) {
#pragma unroll
      for (int row = column; row < kSteps; ++row) {
        const uint4 four = blocks[DeltaTerms::block(row, column)][lane];
        const uint32_t b[2][2] = {{four.x, four.y}, {four.z, four.w}};
        sums.template add<T>(left[column], b, row);
      }
    }
  }

  // By way of the memory of this warp's part of v, which it has read.
  __device__ __forceinline__ void store(Stage& stage, const DeltaChunk& chunk, const Sums& o) const {
    using Rows = Swizzle<Shape::kValueBytes>;
    const uint32_t tile = ptx::shared_address(stage.v);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kDeltaChunk / 8; ++n) {
      const uint32_t row = Rows::row(tile, 8 * n + lane / 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t pair = ptx::movmatrix_trans(pack<T>(o[0][n][2 * half], o[0][n][2 * half + 1]));
        ptx::store_shared(Rows::chunk(row, 2 * warp + half) + lane % 4 * 4, pair);
      }
    }
    __syncwarp();
    const int64_t column = block.slice * Shape::kColumns + 16 * warp + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < kDeltaChunk / 16; ++i) {
      const int token = 16 * i + lane / 2;
      const uint4 eight = ptx::load_shared_16(Rows::chunk(Rows::row(tile, token), 2 * warp + lane % 2));
      if (token < chunk.count && column < in.value_dim)
        *reinterpret_cast<uint4*>(static_cast<T*>(p.o) + block.number(in, chunk.first + token) * in.value_dim +
                                  column) = eight;
    }
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads) delta_chain_kernel(const DeltaRuleParams p) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Chain = DeltaChain<Shape>;
  auto* stages = reinterpret_cast<typename Shape::Stage*>(memory);
  wait_for_inputs();
  const Chain chain(p);
  const Sequence& tokens = chain.block.tokens;
  const int64_t count = (tokens.end - tokens.begin + kDeltaChunk - 1) / kDeltaChunk;
  // Waits for a chunk's tiles, and starts the next one's copies where no loaders do.
  const auto turn = [&](int64_t number, bool copies) {
    if (copies) ptx::cp_async_wait<0>();
    __syncthreads();  // the other stage has been read, too
    if (copies && number + 1 < count) chain.load(stages[(number + 1) % 2], number + 1);
  };
  const bool copies = Shape::kLoaders == 0 || !chain.computes();
  if (copies && count > 0) chain.load(stages[0], 0);
  if (Shape::kLoaders > 0 && copies) {
    for (int64_t number = 0; number < count; ++number) turn(number, true);
    return;
  }
  typename Chain::State state;
  state.clear();
  if (p.initial_state)
    chain.for_state(state, [&](float& one, int64_t i) { one = static_cast<const float*>(p.initial_state)[i]; });
  for (int64_t number = 0; number < count; ++number) {
    turn(number, Shape::kLoaders == 0);
    chain.advance(stages[number % 2], DeltaChunk(tokens, number), state);
  }
  if (p.final_state)
    chain.for_state(state, [&](float& one, int64_t i) { static_cast<float*>(p.final_state)[i] = one; });
}

}  // namespace flashinfer::cuda
