// The second kernel of the delta rule over chunks: the states of a value head one behind the other, and the outputs.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/mainloop.cuh>

namespace flashinfer::cuda {

template <typename Shape>
struct DeltaChainStage : DeltaKeyRows<Shape, Shape::kChannels> {
  static constexpr int kKeptBytes = Shape::kParts > 1 ? static_cast<int>(sizeof(DeltaJoined<Shape>)) : 0;
  alignas(Shape::kAlign) typename Shape::KeyTiles q;
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
  DeltaJoined<Shape>* const joined;  // where there are parts

  __device__ __forceinline__ explicit DeltaChain(const DeltaRuleParams& params, uint32_t block = blockIdx.x,
                                                 void* kept = nullptr)
      : Base(params.in, block), p(params), joined(static_cast<DeltaJoined<Shape>*>(kept)) {}

  __device__ __forceinline__ void load(Stage& to, int64_t number) const {
    const DeltaChunk chunk = this->chunk(number);
    const auto& given = static_cast<const typename Shape::Given*>(p.workspace)[this->place(number)];
    this->load_keys(to, given, chunk), this->load_queries(to, given, chunk);
    this->copy_values(to.v, in.v, in.v_strides, chunk);
    this->copy_terms(to.terms, given);
  }

  __device__ __forceinline__ void advance(Stage& stage, int64_t number, State& state) const {
    const auto& terms = stage.terms;
    typename Base::StateLeft a;
    typename Base::Sums r, o;
    typename Base::Left u, write;
    this->pack_state(a, state);
    Products::read(r, a, this->mine(stage.k));
    this->load_values(write, stage.v);
    Products::template wait<0>(r, a);
    this->template join<true>(r, joined);
    this->finish_residuals(r, u, write, terms);
    Products::read(o, a, this->mine(stage.q));
    Products::template wait<1>(r, u);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      this->scale_tokens(r, m, terms.beta);
      pack_left<T>(u[m], r[0][2 * m], r[0][2 * m + 1]);
      this->scaled(write[m], r, m, terms.write);
    }
    this->decay(state, stage);
    Products::write(state, write, this->mine(stage.written()));
    Products::template wait<1>(o, a);
    this->template join<false>(o, joined);
    if (Shape::kParts > 1 && this->part > 0) {
      Products::template wait<0>(state, write);
      return;
    }
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
  using Stage = DeltaChainStage<Shape>;
  const DeltaChain<Shape> chain(p, blockIdx.x, memory + kWalkBytes<Shape, Stage> - Stage::kKeptBytes);
  walk_chunks<Shape, false>(chain, reinterpret_cast<Stage*>(memory), p.initial_state, p.final_state);
}

}  // namespace flashinfer::cuda
