// The second kernel of the delta rule over chunks: the states of a value head one behind the other, and the outputs.
#pragma once

#include <flashinfer/cuda/delta_chunk_run.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>

namespace flashinfer::cuda {

// Sums of which each part of a state's keys has some: of kJoined tokens, 16 bytes of each lane.
template <typename Shape>
using DeltaJoined = DeltaBlocks[Shape::kWarps][Shape::kJoined / 8];

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

  // Sums of all keys of those that parts have: for all parts, or for the first one alone.
  template <bool kForAll>
  __device__ __forceinline__ void join(DeltaSums16& sums) const {
    if constexpr (Shape::kParts > 1) {
      constexpr int kWarps = Shape::kPartWarps, kTiles = Shape::kJoined / 8;
      const int lane = this->lane, part = this->part;
#pragma unroll
      for (int first = 0; first < DeltaSums16::kN; first += kTiles) {
        ptx::named_barrier<32 * Shape::kWarps>(1);  // what was there has been read
        if (kForAll || part > 0) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const auto& of = sums[0][first + n];
            *reinterpret_cast<float4*>(&(*joined)[this->warp + part * kWarps][n][lane]) =
                make_float4(of[0], of[1], of[2], of[3]);
          }
        }
        ptx::named_barrier<32 * Shape::kWarps>(1);
        if (kForAll || part == 0) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const float4 other =
                *reinterpret_cast<const float4*>(&(*joined)[this->warp + (1 - part) * kWarps][n][lane]);
            auto& of = sums[0][first + n];
            of[0] += other.x, of[1] += other.y, of[2] += other.z, of[3] += other.w;
          }
        }
      }
    }
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
    join<true>(r);
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
    join<false>(o);
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
