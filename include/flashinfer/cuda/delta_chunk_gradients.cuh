// The last kernel of the delta rule's gradients over chunks, each apart from the others: dq, dk, and of gates and
// betas.
//   dP = scale lower(dO u') Gam    X = -strict lower(dR u') Gam    dq = dP k + scale e^G dO S'
//   row = -e^G dR S' + X k    col = dP' q + X' k + e^(Gn-G) u D'    dk = row + col
//   dg_t = <D, S behind the chunk> + sum over i >= t of <q_i, dq_i> + <k_i, row_i> - <k_i, col_i>
// Eight warps: each has 16 tokens and half of the keys. Where q and k are normalised, what is summed is their gradient
// times their factor.
#pragma once

#include <flashinfer/cuda/delta_chunk_reverse.cuh>
#include <flashinfer/cuda/ptx/approx.cuh>

namespace flashinfer::cuda {

template <int kKeys>
struct DeltaGradientsShared {
  static constexpr int kSlice = 64, kStrips = kSlice / 16;  // columns at a time

  struct Stage {
    alignas(128) uint4 grad_o[kDeltaChunk][kSlice / 8];
    alignas(128) uint4 grad_v[kDeltaChunk][kSlice / 8];
    alignas(128) DeltaBlocks r[kStrips][kDeltaChunk / 16];
    alignas(128) DeltaBlocks state[kStrips][kKeys / 16];
    alignas(128) DeltaBlocks grad[kStrips][kKeys / 16];
  };
  alignas(128) uint4 k[kDeltaChunk][kKeys / 8];
  alignas(128) uint4 q[kDeltaChunk][kKeys / 8];
  Stage stages[2];
  alignas(128) DeltaBlocks p[DeltaTerms::kBlocks];  // dP, and X
  alignas(128) DeltaBlocks x[DeltaTerms::kBlocks];
  float read[kDeltaChunk], beta[kDeltaChunk], out[kDeltaChunk], write[kDeltaChunk], last[4];  // as in DeltaTerms
  float sums[kDeltaChunk], k_factor[kDeltaChunk], q_factor[kDeltaChunk];
  float along_q[2][kDeltaChunk], along_row[2][kDeltaChunk], along_col[2][kDeltaChunk];  // <q, dq> and so on, by half
  float behind[8];  // <D, S behind the chunk>, a part of each warp
};

template <typename T, int kKeys>
struct DeltaGradients {
  using Shared = DeltaGradientsShared<kKeys>;
  using Stage = typename Shared::Stage;
  static constexpr int kThreads = 256, kKeyBytes = 2 * kKeys, kSliceBytes = 2 * Shared::kSlice;
  static constexpr int kPairs = kKeys / 32, kSteps = kDeltaChunk / 16;
  using Sums = Accumulator<16, kKeys / 2>;

  const DeltaRuleBackwardParams& p;
  const DeltaRuleInputs& in;
  const DeltaChunkSpace& space;
  Shared& shared;
  DeltaChunk chunk;
  int64_t number, head;  // of q and k
  int lane = threadIdx.x % 32, rows = threadIdx.x / 32 % 4, half = threadIdx.x / 128;

  __device__ __forceinline__ int row() const { return 16 * rows + lane / 4; }

  __device__ __forceinline__ void load_rows() const {
    copy_tokens<T, kKeyBytes, kThreads>(ptx::shared_address(shared.k), in.k, in.k_strides, chunk, head, 0, in.key_dim,
                                        threadIdx.x);
    copy_tokens<T, kKeyBytes, kThreads>(ptx::shared_address(shared.q), in.q, in.q_strides, chunk, head, 0, in.key_dim,
                                        threadIdx.x);
  }
  // A slice of 64 columns.
  __device__ __forceinline__ void load(Stage& to, int64_t value_head, int64_t slice) const {
    const int64_t heads = in.num_value_heads, values = in.value_dim, first = slice * Shared::kSlice;
    const TokenStrides strides{in.num_tokens * heads * values, heads * values, values};
    copy_tokens<T, kSliceBytes, kThreads>(ptx::shared_address(to.grad_o), p.grad_o, strides, chunk, value_head, first,
                                          values, threadIdx.x);
    copy_tokens<T, kSliceBytes, kThreads>(ptx::shared_address(to.grad_v), p.grad_v, strides, chunk, value_head, first,
                                          values, threadIdx.x);
    const int64_t place = number * heads + value_head, strip = slice * Shared::kStrips;
    const auto there = static_cast<int>((values - first + 15) / 16);  // strips; zeros behind them
    copy(to.r, space.residuals + place * space.residual_bytes + strip * sizeof(to.r[0]), there);
    copy(to.state, space.states + place * space.state_bytes + strip * sizeof(to.state[0]), there);
    copy(to.grad, space.grads + place * space.state_bytes + strip * sizeof(to.grad[0]), there);
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void load_terms(int64_t value_head) const {
    const DeltaTerms& terms = space.terms[number * in.num_value_heads + value_head];
    const int i = threadIdx.x % kDeltaChunk;
    if (threadIdx.x < 64) {
      shared.read[i] = terms.read[i], shared.beta[i] = terms.beta[i];
    } else if (threadIdx.x < 128) {
      shared.out[i] = terms.out[i], shared.write[i] = terms.write[i];
    } else if (threadIdx.x < 192) {
      shared.sums[i] = terms.sums[i], shared.k_factor[i] = terms.k_factor[i];
    } else {
      shared.q_factor[i] = terms.q_factor[i];
      if (i == 0) shared.last[0] = terms.last[0];
    }
  }

  // dP or X, dO S', dR S' and u D' of a slice, and <D, S>.
  __device__ __forceinline__ void add_slice(const Stage& stage, Accumulator<16, kDeltaChunk>& local, Sums& dq,
                                            Sums& read, Sums& col, float& product) const {
    const LeftRows<kSliceBytes> outs(ptx::shared_address(stage.grad_o), 16 * rows);
    const LeftRows<kSliceBytes> values(ptx::shared_address(stage.grad_v), 16 * rows);
#pragma unroll
    for (int step = 0; step < Shared::kStrips; ++step) {
      uint32_t out[1][4], value[1][4], u[1][4], r[4];
      outs.load(out[0], 0, step), values.load(value[0], 0, step);
      load_block<true>(r, ptx::shared_address(stage.r[step][rows]));
      u[0][0] = r[0], u[0][1] = r[2], u[0][2] = r[1], u[0][3] = r[3];
      uint32_t mine[1][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) mine[0][i] = half ? value[0][i] : out[0][i];
#pragma unroll
      for (int pair = 0; pair < kSteps; ++pair) {
        if (pair > rows) continue;
        load_block<true>(r, ptx::shared_address(stage.r[step][pair]));
        const uint32_t b[2][2] = {{r[0], r[1]}, {r[2], r[3]}};
        local.template add<T>(mine, b, pair);
      }
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        uint32_t s[4];
        load_block<true>(s, ptx::shared_address(stage.state[step][half * kPairs + pair]));
        load_block<true>(r, ptx::shared_address(stage.grad[step][half * kPairs + pair]));
        const uint32_t state[2][2] = {{s[0], s[1]}, {s[2], s[3]}}, grad[2][2] = {{r[0], r[1]}, {r[2], r[3]}};
        dq.template add<T>(out, state, pair), read.template add<T>(value, state, pair);
        col.template add<T>(u, grad, pair);
        if (step != rows) continue;  // once for each of the four warps that load it
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float a[2], b[2];
          unpack<T>(s[i], a[0], a[1]), unpack<T>(r[i], b[0], b[1]);
          product += a[0] * b[0] + a[1] * b[1];
        }
      }
    }
  }

  // A lane's elements, times a factor of their row.
  __device__ __forceinline__ void scale_rows(Sums& sums, float upper, float lower) const {
#pragma unroll
    for (int n = 0; n < Sums::kN; ++n)
      sums[0][n][0] *= upper, sums[0][n][1] *= upper, sums[0][n][2] *= lower, sums[0][n][3] *= lower;
  }

  // dP or X to shared memory.
  __device__ __forceinline__ void give(const Accumulator<16, kDeltaChunk>& local, float scale) const {
#pragma unroll
    for (int pair = 0; pair < kSteps; ++pair) {
      if (pair > rows) continue;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // upper left, upper right, lower left, lower right
        const int at = row() + i / 2 * 8;
        const auto& of = local[0][2 * pair + i % 2];
        float both[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 16 * pair + 8 * (i % 2) + 2 * (lane % 4) + e;
          const bool kept = half ? column < at : column <= at;
          const float by = kept ? ptx::ex2_approx(shared.sums[at] - shared.sums[column]) : 0.f;
          const float factor = half ? -shared.k_factor[at] : scale * shared.q_factor[at];
          both[e] = of[i / 2 * 2 + e] * (by * factor * shared.k_factor[column] * shared.beta[column]);
        }
        words[i] = pack<T>(both[0], both[1]);
      }
      store_block((half ? shared.x : shared.p)[DeltaTerms::block(rows, pair)], words);
    }
  }

  __device__ __forceinline__ void add_local(Sums& dq, Sums& read, Sums& col) const {
    const SummedRows<kKeyBytes> keys(ptx::shared_address(shared.k), 0), queries(ptx::shared_address(shared.q), 0);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t left[1][4], other[1][4], r[4], b[2][2];
      if (m <= rows) {
        const int block = DeltaTerms::block(rows, m);
        load_block<false>(r, ptx::shared_address(shared.p[block]));
        left[0][0] = r[0], left[0][1] = r[2], left[0][2] = r[1], left[0][3] = r[3];
        load_block<false>(r, ptx::shared_address(shared.x[block]));
        other[0][0] = r[0], other[0][1] = r[2], other[0][2] = r[1], other[0][3] = r[3];
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          keys.load(b, m, half * (kKeys / 16) + 2 * pair);
          dq.template add<T>(left, b, pair), read.template add<T>(other, b, pair);
        }
      }
      if (m >= rows) {
        const int block = DeltaTerms::block(m, rows);
        load_block<true>(left[0], ptx::shared_address(shared.p[block]));
        load_block<true>(other[0], ptx::shared_address(shared.x[block]));
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          queries.load(b, m, half * (kKeys / 16) + 2 * pair);
          col.template add<T>(left, b, pair);
          keys.load(b, m, half * (kKeys / 16) + 2 * pair);
          col.template add<T>(other, b, pair);
        }
      }
    }
  }

  // A pair of a tile's elements where those of tile n of sums are, of the upper or the lower row.
  __device__ __forceinline__ float2 pair_of(const uint4 (&tile)[kDeltaChunk][kKeys / 8], int n, int lower) const {
    const uint32_t start = Swizzle<kKeyBytes>::row(ptx::shared_address(tile), row() + 8 * lower);
    float2 two;
    unpack<T>(ptx::load_shared(Swizzle<kKeyBytes>::chunk(start, half * (kKeys / 16) + n) + lane % 4 * 4), two.x, two.y);
    return two;
  }
  // Of each row, over this warp's keys.
  __device__ __forceinline__ float2 along(const uint4 (&tile)[kDeltaChunk][kKeys / 8], const Sums& sums) const {
    float2 total = make_float2(0.f, 0.f);
#pragma unroll
    for (int n = 0; n < Sums::kN; ++n) {
      const float2 upper = pair_of(tile, n, 0), lower = pair_of(tile, n, 1);
      total.x += upper.x * sums[0][n][0] + upper.y * sums[0][n][1];
      total.y += lower.x * sums[0][n][2] + lower.y * sums[0][n][3];
    }
    return make_float2(quad_sum(total.x), quad_sum(total.y));
  }
  __device__ __forceinline__ void put(float (&to)[2][kDeltaChunk], const float2& total) const {
    if (lane % 4 == 0) to[half][row()] = total.x, to[half][row() + 8] = total.y;
  }

  // A value head: its sums are added to those of the head of q and k.
  __device__ __forceinline__ void add_head(int64_t value_head, float scale, Sums& dq, Sums& dk) const {
    const int64_t slices = space.strips / Shared::kStrips;
    load(shared.stages[0], value_head, 0);
    load_terms(value_head);
    Accumulator<16, kDeltaChunk> local;
    Sums queries, read, col;
    local.clear(), queries.clear(), read.clear(), col.clear();
    float product = 0;
    for (int64_t slice = 0; slice < slices; ++slice) {
      if (slice + 1 < slices) {
        load(shared.stages[(slice + 1) % 2], value_head, slice + 1);
        ptx::cp_async_wait<1>();
      } else {
        ptx::cp_async_wait<0>();
      }
      __syncthreads();
      add_slice(shared.stages[slice % 2], local, queries, read, col, product);
      __syncthreads();
    }
    give(local, scale);
    const int upper = row(), lower = row() + 8;
    scale_rows(queries, shared.out[upper], shared.out[lower]);
    scale_rows(read, -shared.read[upper], -shared.read[lower]);
    scale_rows(col, shared.write[upper] * shared.beta[upper], shared.write[lower] * shared.beta[lower]);
    const float2 written = along(shared.k, col);
    product = lanes_sum<32>(product * shared.last[0] + (lane % 4 == 0 ? written.x + written.y : 0.f));
    if (lane == 0) shared.behind[threadIdx.x / 32] = product;
    __syncthreads();
    add_local(queries, read, col);
    put(shared.along_q, along(shared.q, queries));
    put(shared.along_row, along(shared.k, read));
    put(shared.along_col, along(shared.k, col));
#pragma unroll
    for (int n = 0; n < Sums::kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dq[0][n][i] += queries[0][n][i], dk[0][n][i] += read[0][n][i] + col[0][n][i];
    }
    __syncthreads();
    if (threadIdx.x < 32) give_gates(value_head);
    if (threadIdx.x >= 64 && threadIdx.x < 128) give_beta(value_head, threadIdx.x - 64);
  }

  // dq or dk, through what normalises: dx = sum - f^2 x <x, sum>.
  __device__ __forceinline__ void store(void* to, const Sums& sums, const uint4 (&tile)[kDeltaChunk][kKeys / 8],
                                        const float (&factors)[kDeltaChunk], const float2& all) const {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int token = row() + 8 * lower;
      const float factor = in.l2norm ? factors[token] * factors[token] * (lower ? all.y : all.x) : 0.f;
      const int64_t at = ((chunk.batch * in.num_tokens + chunk.first + token) * in.num_heads + head) * in.key_dim;
#pragma unroll
      for (int n = 0; n < Sums::kN; ++n) {
        const int column = half * (kKeys / 2) + 8 * n + 2 * (lane % 4);
        const float2 x = pair_of(tile, n, lower);
        if (token < chunk.count && column < in.key_dim)
          *reinterpret_cast<uint32_t*>(static_cast<T*>(to) + at + column) =
              pack<T>(sums[0][n][2 * lower] - factor * x.x, sums[0][n][2 * lower + 1] - factor * x.y);
      }
    }
  }

 private:
  template <typename Blocks>
  __device__ __forceinline__ void copy(Blocks& to, const char* from, int strips) const {
    const uint32_t start = ptx::shared_address(to);
#pragma unroll
    for (uint32_t i = threadIdx.x * 16; i < sizeof(Blocks); i += kThreads * 16) {
      const bool there = static_cast<int>(i / sizeof(to[0])) < strips;
      ptx::cp_async_16(start + i, there ? from + i : from, there);
    }
  }
  __device__ __forceinline__ int64_t token(int i, int64_t value_head) const {
    return (chunk.batch * in.num_tokens + chunk.first + i) * in.num_value_heads + value_head;
  }
  // By one warp: sums from the last token to the first.
  __device__ __forceinline__ void give_gates(int64_t value_head) const {
    if (!p.grad_g) return;
    const auto of = [&](int i) {
      return shared.along_q[0][i] + shared.along_q[1][i] + shared.along_row[0][i] + shared.along_row[1][i] -
             (shared.along_col[0][i] + shared.along_col[1][i]);
    };
    const int last = kDeltaChunk - 1 - 2 * lane;  // this lane's two tokens: last, and the one before it
    const float one = of(last), two = of(last - 1);
    float sum = one + two;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const float more = __shfl_up_sync(kAllLanes, sum, by);
      if (lane >= by) sum += more;
    }
    float before = __shfl_up_sync(kAllLanes, sum, 1);
    if (lane == 0) before = 0;
    float behind = 0;
#pragma unroll
    for (float part : shared.behind) behind += part;
    float* to = static_cast<float*>(p.grad_g);
    if (last < chunk.count) to[token(last, value_head)] = behind + before + one;
    if (last - 1 < chunk.count) to[token(last - 1, value_head)] = behind + sum;
  }
  __device__ __forceinline__ void give_beta(int64_t value_head, int i) const {
    if (!p.grad_beta || i >= chunk.count) return;
    const float* parts = space.betas + (number * in.num_value_heads + value_head) * space.strips * kDeltaChunk;
    float total = 0;
    for (int64_t strip = 0; strip < space.strips; ++strip)
      if (16 * strip < in.value_dim) total += parts[strip * kDeltaChunk + i];
    static_cast<float*>(p.grad_beta)[token(i, value_head)] = total;
  }
};

template <typename T, int kKeys>
__global__ void __launch_bounds__(DeltaGradients<T, kKeys>::kThreads)
    delta_gradients_kernel(const DeltaRuleBackwardParams p, int64_t chunks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  using Gradients = DeltaGradients<T, kKeys>;
  auto& shared = *reinterpret_cast<typename Gradients::Shared*>(memory);
  wait_for_inputs();
  const DeltaRuleInputs& in = p.in;
  const int64_t head = blockIdx.x % in.num_heads, number = blockIdx.x / in.num_heads;
  const DeltaChunk chunk = find_chunk(in, number);
  if (chunk.count <= 0) return;
  const DeltaChunkSpace space(in, kKeys, chunks, p.workspace);
  const Gradients gradients{p, in, space, shared, chunk, number, head};
  const float scale = static_cast<float>(in.scale.get());
  typename Gradients::Sums dq, dk;
  dq.clear(), dk.clear();
  gradients.load_rows();
  for (int64_t i = 0; i < in.group(); ++i) {
    gradients.add_head(head * in.group() + i, scale, dq, dk);
    __syncthreads();
  }
  float2 all_q = gradients.along(shared.q, dq), all_k = gradients.along(shared.k, dk);
  gradients.put(shared.along_q, all_q), gradients.put(shared.along_row, all_k);
  __syncthreads();
  const int row = gradients.row();
  const auto both = [&](const float (&of)[2][kDeltaChunk]) {
    return make_float2(of[0][row] + of[1][row], of[0][row + 8] + of[1][row + 8]);
  };
  all_q = both(shared.along_q), all_k = both(shared.along_row);
  gradients.store(p.grad_q, dq, shared.q, shared.q_factor, all_q);
  gradients.store(p.grad_k, dk, shared.k, shared.k_factor, all_k);
}

}  // namespace flashinfer::cuda
