// Forward scan for calls with fewer heads than SMs. Their time is the latency of a chunk times the number of
// chunks, so states do not wait for outputs.
//
// Two warps have 16 columns each and advance the state. They store the state and u to smem. From these, two
// more warps compute the output of the previous chunk. Two producer warps copy two chunks ahead.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/forward/kernel.cuh>

namespace flashinfer::cuda {

template <typename T, int kKeys>
struct DeltaSplitShape : DeltaWarpShape<T, kKeys, 2, 2> {
  static constexpr int kThreads = 192, kStages = 4;
};

template <typename Shape>
struct DeltaSplitShared {
  DeltaForwardStage<Shape> stages[Shape::kStages];
  struct {  // A operands, 16 bytes per lane
    DeltaBlock16 state[Shape::kWarps][Shape::kKeys / 16];
    DeltaBlock16 u[Shape::kWarps][kDeltaChunk / 16];
  } exchange[2];
};

template <typename Shape>
struct DeltaSplit : DeltaForwardScan<Shape> {
  using Base = DeltaForwardScan<Shape>;
  using T = typename Shape::T;
  using Stage = typename Base::Stage;
  using State = typename Base::State;
  using Products = typename Shape::Products;
  using Exchange = decltype(DeltaSplitShared<Shape>::exchange[0]);
  using Base::kSteps, Base::lane, Base::warp;

  enum Role { kStateRole, kOutputRole, kProducerRole };
  const int role;

  __device__ __forceinline__ explicit DeltaSplit(const DeltaRuleParams& params)
      : Base(params), role(threadIdx.x / 32 / Shape::kWarps) {
    warp %= Shape::kWarps;
  }

  // Advance the state over a chunk. Store the old state and u to `to`.
  __device__ __forceinline__ void advance_state(Stage& stage, Exchange& to, State& state) const {
    const auto& terms = stage.terms;
    typename Base::StateOperandA a;
    typename Base::TokenAccumulators r;
    typename Base::OperandA left;
    Products::multiply_state(r, a, this->key_part(stage.k), [&](int i) {
      pack_operand_a<T>(a[i], state[0][2 * i], state[0][2 * i + 1]);
      to.state[warp][i][lane] = as_vector(a[i]);
    });
    this->subtract_from_values(r, stage.v, terms.k_decay);
    this->pack_scaled(left, r, terms.beta);
    Products::template multiply<true>(r, left, terms.z);
    this->decay(state, stage);
    Products::update_state(state, left, this->key_part(stage.update_rows()), [&](int m) {
      this->scale_tokens(r, m, terms.beta);
      pack_operand_a<T>(left[m], r[0][2 * m], r[0][2 * m + 1]);
      to.u[warp][m][lane] = as_vector(left[m]);
      this->pack_scaled(left[m], r, m, terms.update_decay);
    });
  }

  __device__ __forceinline__ void output(Stage& stage, const Exchange& from, int64_t number) const {
    typename Base::StateOperandA a;
    typename Base::TokenAccumulators o;
    typename Base::OperandA u;
    Products::multiply_state(o, a, stage.q, [&](int i) { from_vector(a[i], from.state[warp][i][lane]); });
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      this->scale_tokens(o, m, stage.terms.q_decay);
      from_vector(u[m], from.u[warp][m][lane]);
    }
    Products::template multiply<true>(o, u, stage.terms.p);
    this->template store<false>(this->p.o, stage.v, this->chunk(number), o);
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads) delta_split_kernel(const DeltaRuleParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<DeltaSplitShared<Shape>*>(memory);
  wait_for_inputs();
  const DeltaSplit<Shape> split(p);
  const int64_t count = split.num_chunks();
  if (split.role == split.kProducerRole) {
    const auto load = [&](int64_t i) {
      if (i < count) split.load(shared.stages[i % Shape::kStages], i);
      ptx::cp_async_commit();
    };
    load(0), load(1);
    for (int64_t i = 0; i <= count; ++i) {
      ptx::cp_async_wait<1>();
      __syncthreads();
      load(i + 2);
    }
  } else if (split.role == split.kOutputRole) {
    __syncthreads();
    for (int64_t i = 0; i < count; ++i) {
      __syncthreads();  // the state and u of chunk i are in smem
      split.output(shared.stages[i % Shape::kStages], shared.exchange[i % 2], i);
    }
  } else {
    typename DeltaSplit<Shape>::State state;
    state.clear();
    if (p.initial_state)
      split.for_state_elements(state,
                               [&](float& one, int64_t i) { one = static_cast<const float*>(p.initial_state)[i]; });
    for (int64_t i = 0; i < count; ++i) {
      __syncthreads();
      split.advance_state(shared.stages[i % Shape::kStages], shared.exchange[i % 2], state);
    }
    __syncthreads();
    if (p.final_state)
      split.for_state_elements(state, [&](float& one, int64_t i) { static_cast<float*>(p.final_state)[i] = one; });
  }
}

}  // namespace flashinfer::cuda
