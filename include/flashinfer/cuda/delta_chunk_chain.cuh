// The second kernel of the delta rule over chunks: the states of a value head one behind the other, and the outputs.
#pragma once

#include <flashinfer/cuda/delta_chunk_walk.cuh>

namespace flashinfer::cuda {

template <typename Shape>
struct DeltaChainStage {
  alignas(128) typename Shape::Keys k;
  alignas(128) typename Shape::Keys q;
  alignas(128) typename Shape::Values v;  // then o
  alignas(128) DeltaTerms terms;
};

template <typename Shape>
struct DeltaChain : DeltaWalk<Shape> {
  using Base = DeltaWalk<Shape>;
  using T = typename Shape::T;
  using Stage = DeltaChainStage<Shape>;
  using State = typename Base::State;
  using Base::in, Base::kSteps;

  const DeltaRuleParams& p;

  __device__ __forceinline__ explicit DeltaChain(const DeltaRuleParams& params) : Base(params.in), p(params) {}

  __device__ __forceinline__ void load(Stage& to, int64_t number) const {
    const DeltaChunk chunk = this->chunk(number);
    this->copy_keys(to.k, in.k, in.k_strides, chunk);
    this->copy_keys(to.q, in.q, in.q_strides, chunk);
    this->copy_values(to.v, in.v, in.v_strides, chunk);
    const auto* terms = static_cast<const DeltaTerms*>(p.workspace) + this->place(number);
    this->copy_bytes(&to.terms, terms, kDeltaForwardTerms);
  }

  __device__ __forceinline__ void advance(Stage& stage, int64_t number, State& state) const {
    const DeltaTerms& terms = stage.terms;
    typename Base::Sums r, o;
    r.clear(), o.clear();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      uint32_t a[1][4];
      pack_left<T>(a[0], state[0][2 * step], state[0][2 * step + 1]);
      this->read(r, a, stage.k, step), this->read(o, a, stage.q, step);
    }
    this->subtract_from_values(r, stage.v, terms.read);
    typename Base::Left left;  // B r, then u
#pragma unroll
    for (int m = 0; m < kSteps; ++m) this->scaled(left[m][0], r, m, terms.beta);
    this->template multiply<true>(r, left, terms.z);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      this->scale_tokens(o, m, terms.out), this->scale_tokens(r, m, terms.beta);
      pack_left<T>(left[m][0], r[0][2 * m], r[0][2 * m + 1]);
    }
    this->template multiply<true>(o, left, terms.p);
    state.scale(terms.last[0]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[1][4];
      this->scaled(a[0], r, step, terms.write);
      this->write(state, a, stage.k, step);
    }
    this->store(p.o, stage.v, this->chunk(number), o);
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads) delta_chain_kernel(const DeltaRuleParams p) {
  extern __shared__ __align__(128) unsigned char memory[];
  wait_for_inputs();
  run_walk<Shape, false>(DeltaChain<Shape>(p), reinterpret_cast<DeltaChainStage<Shape>*>(memory), p.initial_state,
                         p.final_state);
}

}  // namespace flashinfer::cuda
