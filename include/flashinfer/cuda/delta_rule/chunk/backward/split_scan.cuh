// Both scans of the chunk gradients, for calls with fewer heads than SMs. Their time is the latency of a
// chunk times the number of chunks.
//
// Two warps have 16 columns each and advance D. Two more compute the terms of the next chunk that need no D,
// P' dO and scale Q' (e^G dO), and store the results of the previous chunk. Four producer warps issue copies:
// with two, copies would take longer than a step of D.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/backward/scan.cuh>

namespace flashinfer::cuda {

template <typename T, int kKeys>
struct DeltaSplitBackwardShape : DeltaWarpShape<T, kKeys, 2, 4> {
  static constexpr int kThreads = 256;
};

// Inputs of a step: keys, Z and factors of its chunk; queries, dO, P and output factors of the next one.
template <typename Shape>
struct DeltaSplitBackwardStage {
  alignas(128) typename Shape::Keys k;
  alignas(128) typename Shape::Keys q;
  alignas(128) typename Shape::Values grad;  // overwritten by dy of the previous chunk
  alignas(128) DeltaTerms terms;
};

template <typename Shape>
struct DeltaSplitBackwardShared {
  static constexpr int kStages = 3;

  DeltaSplitBackwardStage<Shape> stages[kStages];
  struct {  // per lane, double-buffered
    DeltaBlock16 state[Shape::kWarps][Shape::kKeys / 16], dy[Shape::kWarps][kDeltaChunk / 16];  // A operands
    float4 outputs[Shape::kWarps][kDeltaChunk / 8][32];                                         // accumulators: P' dO
    float4 added[Shape::kWarps][Shape::kKeys / 8][32];                                          // scale Q' (e^G dO)
  } exchange[2];
};

template <typename Shape>
struct DeltaSplitBackward : DeltaScan<Shape> {
  using Base = DeltaScan<Shape>;
  using T = typename Shape::T;
  using State = typename Base::State;
  using Products = typename Shape::Products;
  using Stage = DeltaSplitBackwardStage<Shape>;
  using Shared = DeltaSplitBackwardShared<Shape>;
  using Exchange = decltype(Shared::exchange[0]);
  using Base::in, Base::kSteps, Base::lane, Base::warp;

  const DeltaRuleBackwardParams& p;
  const DeltaBackwardWorkspace& workspace;
  enum Role { kStateRole, kTermRole, kProducerRole };  // D; terms without D; copies
  const int role;

  __device__ __forceinline__ DeltaSplitBackward(const DeltaRuleBackwardParams& params, const DeltaBackwardWorkspace& to,
                                                uint32_t number)
      : Base(params.in, number),
        p(params),
        workspace(to),
        role(min(threadIdx.x / 32 / Shape::kWarps, int{kProducerRole})) {
    warp %= Shape::kWarps;
  }

  // Copy inputs of chunk `number` and of chunk number - 1, the next one of this scan. One of the two may not
  // exist.
  __device__ __forceinline__ void load(Stage& to, int64_t number, int64_t count) const {
    if (number < count) {
      const DeltaTerms& from = workspace.terms[this->index(number)];
      this->copy_keys(to.k, in.k, in.k_strides, this->chunk(number));
      this->copy_bytes(&to.terms.z, &from.z, sizeof(from.z));
      this->copy_bytes(&to.terms.k_decay, &from.k_decay, sizeof(from.k_decay) + sizeof(from.beta));
      this->copy_bytes(&to.terms.update_decay, &from.update_decay,
                       sizeof(from.update_decay) + sizeof(from.chunk_decay));
    }
    if (number > 0) {
      const DeltaChunk next = this->chunk(number - 1);
      const DeltaTerms& from = workspace.terms[this->index(number - 1)];
      const int64_t heads = in.num_value_heads, values = in.value_dim;
      this->copy_keys(to.q, in.q, in.q_strides, next);
      this->copy_values(to.grad, p.grad_o, {in.num_tokens * heads * values, heads * values, values}, next);
      this->copy_bytes(&to.terms.p, &from.p, sizeof(from.p));
      this->copy_bytes(&to.terms.q_decay, &from.q_decay, sizeof(from.q_decay));
    }
  }

  // Advance D over a chunk. Store D after the chunk, and dy, to `exchange`.
  __device__ __forceinline__ void advance_state(const Stage& stage, Exchange& exchange, State& state) const {
    const auto& terms = stage.terms;
    typename Base::StateOperandA a;
    typename Base::TokenAccumulators du;
    typename Base::OperandA left;
    Products::multiply_state(du, a, stage.k, [&](int i) {
      pack_operand_a<T>(a[i], state[0][2 * i], state[0][2 * i + 1]);
      exchange.state[warp][i][lane] = as_vector(a[i]);
    });
#pragma unroll
    for (int n = 0; n < Base::TokenAccumulators::kN; ++n) {
      const float2 by = this->token_factors(terms.update_decay, n);
      add(du[0][n], by, exchange.outputs[warp][n][lane]);
    }
    this->pack_scaled(left, du, terms.beta);
    Products::template multiply<false>(du, left, terms.z);  // dy
    const float2 last = make_float2(terms.chunk_decay[0], terms.chunk_decay[0]);
#pragma unroll
    for (int n = 0; n < State::kN; ++n) add(state[0][n], last, exchange.added[warp][n][lane]);
    Products::update_state(state, left, stage.k, [&](int m) {
      pack_finite_operand_a<T>(left[m], du[0][2 * m], du[0][2 * m + 1]);
      exchange.dy[warp][m][lane] = as_vector(left[m]);
      this->scale_tokens(du, m, terms.beta);
      this->pack_scaled(left[m], du, m, terms.k_decay, -1.f);
    });
  }

  // Compute the terms of the next chunk that need no D: P' dO and scale Q' (e^G dO).
  __device__ __forceinline__ void prepare(const Stage& stage, Exchange& exchange) const {
    typename Base::TokenAccumulators outputs;
    typename Base::OperandA grad;
    State added;
    this->load_values(grad, stage.grad);
    Products::template multiply<false, true>(outputs, grad, stage.terms.p);
#pragma unroll
    for (int n = 0; n < Base::TokenAccumulators::kN; ++n) exchange.outputs[warp][n][lane] = as_float4(outputs[0][n]);
    this->scale_values(grad, stage.terms.q_decay);
    added.clear();
    Products::update_state(added, grad, stage.q);
#pragma unroll
    for (int n = 0; n < State::kN; ++n) exchange.added[warp][n][lane] = as_float4(added[0][n]);
  }

  // Store D and dy of a chunk, through this warp's part of a tile.
  __device__ __forceinline__ void finish(Stage& stage, const Exchange& exchange, int64_t number) const {
    const int64_t strip = this->column() / 16;
    char* const grads =
        workspace.grads + this->index(number) * workspace.state_bytes + strip * sizeof(exchange.state[0]);
    if (strip < workspace.strips) {
#pragma unroll
      for (int i = 0; i < Shape::kKeys / 16; ++i) {
        uint32_t words[4];
        from_vector(words, exchange.state[warp][i][lane]);
        store_block(grads + i * sizeof(DeltaBlock16), words);
      }
    }
    this->template store<false>(p.grad_v, stage.grad, this->chunk(number),
                                [&](uint32_t (&words)[4], int m) { from_vector(words, exchange.dy[warp][m][lane]); });
  }

 private:
  __device__ __forceinline__ static void add(float (&sums)[4], const float2& by, const float4& addend) {
    sums[0] = sums[0] * by.x + addend.x, sums[1] = sums[1] * by.y + addend.y;
    sums[2] = sums[2] * by.x + addend.z, sums[3] = sums[3] * by.y + addend.w;
  }
  __device__ __forceinline__ static float4 as_float4(const float (&sums)[4]) {
    return make_float4(sums[0], sums[1], sums[2], sums[3]);
  }
};

// Chunk i is the i-th from the end. In step i, kStateRole advances D over chunk i, kTermRole prepares chunk i
// + 1 and stores chunk i - 1, and the producers copy the inputs of step i + 2.
template <typename Shape>
__device__ __forceinline__ void split_backward(const DeltaSplitBackward<Shape>& scan,
                                               DeltaSplitBackwardShared<Shape>& shared) {
  const DeltaRuleBackwardParams& p = scan.p;
  const int count = static_cast<int>(scan.num_chunks());
  const auto stage = [&](int i) -> auto& { return shared.stages[(i + 1) % shared.kStages]; };
  if (scan.role == scan.kProducerRole) {
    const auto load = [&](int i) {
      if (i < count) scan.load(stage(i), count - 1 - i, count);
      ptx::cp_async_commit();
    };
    load(-1), load(0);
    for (int i = -1; i <= count; ++i) {
      ptx::cp_async_wait<1>();
      __syncthreads();
      load(i + 2);
    }
  } else if (scan.role == scan.kTermRole) {
    for (int i = -1; i <= count; ++i) {
      __syncthreads();
      if (i + 1 < count) scan.prepare(stage(i), shared.exchange[(i + 1) % 2]);
      if (i > 0) scan.finish(stage(i), shared.exchange[(i - 1) % 2], count - i);
    }
  } else {
    typename DeltaSplitBackward<Shape>::State state;
    state.clear();
    if (p.grad_state)
      scan.for_state_elements(state, [&](float& one, int64_t i) { one = static_cast<const float*>(p.grad_state)[i]; });
    __syncthreads();
    for (int i = 0; i < count; ++i) {
      __syncthreads();
      scan.advance_state(stage(i), shared.exchange[i % 2], state);
    }
    __syncthreads();
    scan.for_state_elements(state, [&](float& one, int64_t i) { static_cast<float*>(p.grad_initial_state)[i] = one; });
  }
}

template <typename T, int kKeys>
struct DeltaSplitScans {
  using Backward = DeltaSplitBackwardShape<T, kKeys>;
  using Recompute = DeltaWarpShape<T, kKeys, 2, 4>;
  static constexpr int kThreads = Backward::kThreads, kColumns = Backward::kColumns;
  static constexpr int kRecomputeBytes = kScanBytes<Recompute, DeltaRecomputeStage<Recompute>>;
  static constexpr int kBackwardBytes = sizeof(DeltaSplitBackwardShared<Backward>);
  static constexpr int kBytes = kRecomputeBytes > kBackwardBytes ? kRecomputeBytes : kBackwardBytes;
  static_assert(Recompute::kThreads <= kThreads && Recompute::kColumns == kColumns,
                "both scans fit the CTAs of one launch");
};

template <typename Scans>
__global__ void __launch_bounds__(Scans::kThreads, 1)
    delta_split_backward_scans_kernel(const DeltaRuleBackwardParams p, int64_t chunks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  using Recompute = typename Scans::Recompute;
  using Backward = typename Scans::Backward;
  wait_for_inputs();
  const DeltaBackwardWorkspace workspace(p.in, Recompute::kKeys, chunks, p.workspace);
  const uint32_t scans = gridDim.x / 2;
  if (blockIdx.x < scans) {
    const DeltaSplitBackward<Backward> backward(p, workspace, blockIdx.x);
    split_backward(backward, *reinterpret_cast<DeltaSplitBackwardShared<Backward>*>(memory));
  } else if (threadIdx.x < Recompute::kThreads) {  // barriers do not wait for exited threads
    recompute_chunks<Recompute>(p, workspace, memory, blockIdx.x - scans);
  }
}

}  // namespace flashinfer::cuda
