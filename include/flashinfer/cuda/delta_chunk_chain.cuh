// The second kernel of the delta rule over chunks: the states of a value head one behind the other, and the outputs.
#pragma once

#include <flashinfer/cuda/delta_chunk_run.cuh>

namespace flashinfer::cuda {

template <typename Shape>
struct DeltaChainStage {
  static constexpr int kKeptBytes = 0;
  alignas(Shape::kAlign) typename Shape::Keys k;
  alignas(Shape::kAlign) typename Shape::Keys q;
  alignas(128) typename Shape::Values v;  // then o
  typename Shape::Terms terms;
};

template <typename Shape>
struct DeltaChain : DeltaWalk<Shape> {
  using Base = DeltaWalk<Shape>;
  using T = typename Shape::T;
  using Stage = DeltaChainStage<Shape>;
  using State = typename Base::State;
  using Products = typename Shape::Products;
  using Base::in, Base::kSteps;

  const DeltaRuleParams& p;

  __device__ __forceinline__ explicit DeltaChain(const DeltaRuleParams& params, uint32_t block = blockIdx.x)
      : Base(params.in, block), p(params) {}

  __device__ __forceinline__ void load(Stage& to, int64_t number) const {
    const DeltaChunk chunk = this->chunk(number);
    this->copy_keys(to.k, in.k, in.k_strides, chunk);
    this->copy_keys(to.q, in.q, in.q_strides, chunk);
    this->copy_values(to.v, in.v, in.v_strides, chunk);
    this->copy_terms(to.terms, static_cast<const DeltaTerms*>(p.workspace)[this->place(number)]);
  }

  __device__ __forceinline__ void advance(Stage& stage, int64_t number, State& state) const {
    const auto& terms = stage.terms;
    typename Base::StateLeft a;
    typename Base::Sums r, o;
    typename Base::Left u, write;
    this->pack_state(a, state);
    this->start_residuals(r, u, a, stage);
    Products::read(o, a, stage.q);
    Products::template wait<1>(r, u);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      this->scale_tokens(r, m, terms.beta);
      pack_left<T>(u[m], r[0][2 * m], r[0][2 * m + 1]);
      this->scaled(write[m], r, m, terms.write);
    }
    state.scale(terms.last[0]);
    Products::write(state, write, stage.k);
    Products::template wait<1>(o, a);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) this->scale_tokens(o, m, terms.out);
    Products::template multiply<true>(o, u, terms.p);
    Products::template wait<0>(o, u, state, write);
    this->store(p.o, stage.v, this->chunk(number), o);
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) delta_chain_kernel(const DeltaRuleParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  wait_for_inputs();
  walk_chunks<Shape, false>(DeltaChain<Shape>(p), reinterpret_cast<DeltaChainStage<Shape>*>(memory), p.initial_state,
                            p.final_state);
}

}  // namespace flashinfer::cuda
