// The states and residuals of all chunks again, and the gradients of states from the last chunk to the first. With D
// the gradient of the state behind a chunk:
//   du = P' dO + e^(Gn-G) K D    dy = du - Z' (B du)    dR = B dy = dV    D = e^Gn D + scale Q' (e^G dO) - K' (e^G dR)
// Neither needs the other, so they are halves of one launch. Both leave behind, as operands of the kernel that follows,
// what a chunk begins with; dy is left where dV will be.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/mainloop.cuh>

namespace flashinfer::cuda {

// What chunks and value heads leave behind, in order. Of states, blocks [columns / 16, kKeys / 16]; of residuals, r
// transposed, blocks [columns / 16, 4]. The columns fill whole slices of 64.
struct DeltaChunkSpace {
  int64_t strips, state_bytes, residual_bytes;
  DeltaTerms* terms;  // or what has them and more
  char *states, *grads, *residuals;
  float* sums;  // dq and dk that more is added to: of value heads, of parts of keys
  char* end;

  FLASHINFER_HD DeltaChunkSpace(const DeltaRuleInputs& in, int keys, int64_t chunks, void* workspace)
      : strips((in.value_dim + 63) / 64 * 4),
        state_bytes(strips * keys / 16 * 512),
        residual_bytes(strips * kDeltaChunk / 16 * 512) {
    const int64_t count = chunks * in.num_value_heads;
    char* next = static_cast<char*>(workspace);
    terms = reinterpret_cast<DeltaTerms*>(next), next += count * delta_term_bytes(in);
    states = next, next += count * state_bytes;
    grads = next, next += count * state_bytes;
    residuals = next, next += count * residual_bytes;
    sums = reinterpret_cast<float*>(next);
    if (in.gk ? in.group() > 1 : keys > 128 && in.l2norm)
      next += chunks * in.num_heads * kDeltaChunk * 2 * keys * static_cast<int64_t>(sizeof(float));
    end = next;
  }
};

// Blocks of a warp on their way to memory.
template <typename Shape>
struct DeltaKeptState {
  DeltaBlocks state[Shape::kPartKeys / 16];
};
template <typename Shape>
struct DeltaKeptResiduals : DeltaKeptState<Shape> {
  DeltaBlocks r[kDeltaChunk / 16];
};

// Of shared memory behind the stages: those of all warps, and what parts of a state's keys add.
template <typename Shape, typename Kept>
constexpr int kDeltaWayBytes = Shape::kHopper ? Shape::kWarps * static_cast<int>(sizeof(Kept)) : 0;
template <typename Shape, typename Kept>
constexpr int kDeltaKeptBytes =
    kDeltaWayBytes<Shape, Kept> + (Shape::kParts > 1 ? static_cast<int>(sizeof(DeltaJoined<Shape>)) : 0);

template <typename Shape>
struct DeltaReplayStage : DeltaKeyRows<Shape, Shape::kChannels> {
  using Kept = DeltaKeptResiduals<Shape>;
  static constexpr int kKeptBytes = kDeltaKeptBytes<Shape, Kept>;
  alignas(128) typename Shape::Values v;
  typename Shape::TermsOfZ terms;
};

template <typename Shape>
struct DeltaReplay : DeltaWalk<Shape> {
  using Base = DeltaWalk<Shape>;
  using T = typename Shape::T;
  using Stage = DeltaReplayStage<Shape>;
  using State = typename Base::State;
  using Products = typename Shape::Products;
  using Base::in, Base::kSteps;

  const DeltaChunkSpace& space;
  typename Stage::Kept* kept;
  DeltaJoined<Shape>* joined;

  __device__ __forceinline__ DeltaReplay(const DeltaRuleInputs& inputs, const DeltaChunkSpace& to, void* behind_stages,
                                         uint32_t number)
      : Base(inputs, number),
        space(to),
        kept(static_cast<typename Stage::Kept*>(behind_stages) + threadIdx.x / 32),
        joined(reinterpret_cast<DeltaJoined<Shape>*>(static_cast<char*>(behind_stages) +
                                                     kDeltaWayBytes<Shape, typename Stage::Kept>)) {}

  __device__ __forceinline__ void load(Stage& to, int64_t number) const {
    const DeltaChunk chunk = this->chunk(number);
    const auto& given = static_cast<const typename Shape::Given*>(space.terms)[this->place(number)];
    this->load_keys(to, given, chunk);
    this->copy_values(to.v, in.v, in.v_strides, chunk);
    this->copy_terms(to.terms, given);
  }

  __device__ __forceinline__ void advance(Stage& stage, int64_t number, State& state) const {
    const auto& terms = stage.terms;
    typename Base::StateLeft a;
    typename Base::Sums r;
    typename Base::Left left, values;
    const int64_t strip = this->column() / 16, place = this->place(number);
    const bool wanted = strip < space.strips;
    this->pack_state(a, state);
    char* const states = space.states + place * space.state_bytes + this->state_block(strip) * sizeof(DeltaBlocks);
    if constexpr (Shape::kHopper) {
      Products::read(r, a, this->mine(stage.k));
      this->template keep_blocks<1>(states, kept->state, a, wanted);
    } else {
      Products::read(r, a, this->mine(stage.k), this->keeper(states, a, wanted));
    }
    this->load_values(values, stage.v);
    Products::template wait<0>(r, a);
    this->template join<true>(r, joined);
    this->finish_residuals(r, left, values, terms);
    this->decay(state, stage);
    Products::template wait<0>(r, left);
    typename Base::Left residuals;
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      pack_left<T>(residuals[m], r[0][2 * m], r[0][2 * m + 1]);
      this->scale_tokens(r, m, terms.beta);
    }
    this->scaled(left, r, terms.write);
    char* const to = space.residuals + place * space.residual_bytes + strip * sizeof(kept->r);
    const bool first = wanted && this->part == 0;
    if constexpr (Shape::kHopper) {
      Products::write(state, left, this->mine(stage.written()));
      this->template keep_blocks<1>(to, kept->r, residuals, first);
    } else {
      Products::write(state, left, this->mine(stage.written()), this->keeper(to, residuals, first));
    }
    Products::template wait<0>(state, left);
  }
};

template <typename Shape>
struct DeltaReverseStage : DeltaKeyRows<Shape, Shape::kChannels> {
  using Kept = DeltaKeptState<Shape>;
  static constexpr int kKeptBytes = kDeltaKeptBytes<Shape, Kept>;
  alignas(Shape::kAlign) typename Shape::KeyTiles q;
  alignas(128) typename Shape::Values grad;  // dO, then dy
  typename Shape::Terms terms;
};

template <typename Shape>
struct DeltaReverse : DeltaWalk<Shape> {
  using Base = DeltaWalk<Shape>;
  using T = typename Shape::T;
  using Stage = DeltaReverseStage<Shape>;
  using State = typename Base::State;
  using Products = typename Shape::Products;
  using Base::in, Base::kSteps;

  const DeltaRuleBackwardParams& p;
  const DeltaChunkSpace& space;
  typename Stage::Kept* kept;
  DeltaJoined<Shape>* joined;

  __device__ __forceinline__ DeltaReverse(const DeltaRuleBackwardParams& params, const DeltaChunkSpace& to,
                                          void* behind_stages, uint32_t number)
      : Base(params.in, number),
        p(params),
        space(to),
        kept(static_cast<typename Stage::Kept*>(behind_stages) + threadIdx.x / 32),
        joined(reinterpret_cast<DeltaJoined<Shape>*>(static_cast<char*>(behind_stages) +
                                                     kDeltaWayBytes<Shape, typename Stage::Kept>)) {}

  __device__ __forceinline__ void load(Stage& to, int64_t number) const {
    const DeltaChunk chunk = this->chunk(number);
    const int64_t heads = in.num_value_heads, values = in.value_dim;
    const auto& given = static_cast<const typename Shape::Given*>(space.terms)[this->place(number)];
    this->load_keys(to, given, chunk), this->load_queries(to, given, chunk);
    this->copy_values(to.grad, p.grad_o, {in.num_tokens * heads * values, heads * values, values}, chunk);
    this->copy_terms(to.terms, given);
  }

  __device__ __forceinline__ void advance(Stage& stage, int64_t number, State& state) const {
    const auto& terms = stage.terms;
    const int64_t strip = this->column() / 16, place = this->place(number);
    const bool wanted = strip < space.strips;
    typename Base::StateLeft a;
    typename Base::Sums du, of_outputs;
    typename Base::Left grad, left;
    this->load_values(grad, stage.grad);
    this->pack_state(a, state);
    char* const grads = space.grads + place * space.state_bytes + this->state_block(strip) * sizeof(DeltaBlocks);
    if constexpr (Shape::kHopper) {
      Products::read(du, a, this->mine(stage.written()));
      Products::template multiply<false, true>(of_outputs, grad, terms.p);
      this->template keep_blocks<0>(grads, kept->state, a, wanted);
    } else {
      Products::read(du, a, this->mine(stage.written()), this->keeper(grads, a, wanted));
      Products::template multiply<false, true>(of_outputs, grad, terms.p);
    }
    Products::template wait<1>(du, a);
    this->template join<true>(du, joined);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) this->scale_tokens(du, m, terms.write);
    Products::template wait<0>(of_outputs, grad);
#pragma unroll
    for (int n = 0; n < Base::Sums::kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) du[0][n][i] += of_outputs[0][n][i];
    }
    this->scaled(left, du, terms.beta);
    Products::template multiply<false>(du, left, terms.z);  // dy
    this->decay(state, stage);
    this->scale_values(grad, terms.out);
    Products::write(state, grad, this->mine(stage.q));
    Products::template wait<1>(du, left);
    typename Base::Sums values = du;  // dV
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      this->scale_tokens(values, m, terms.beta);
      this->scaled(left[m], values, m, terms.read, -1.f);
    }
    Products::write(state, left, this->mine(stage.k));
    if (Shape::kParts == 1 || this->part == 0) {
      this->template store<true>(p.grad_v, stage.grad, this->chunk(number), [&](uint32_t (&four)[4], int m) {
        pack_finite_left<T>(four, du[0][2 * m], du[0][2 * m + 1]);
      });
    }
    Products::template wait<0>(state, grad, left);
  }
};

// By block `number` of those that do.
template <typename Shape>
__device__ __forceinline__ void replay_chunks(const DeltaRuleBackwardParams& p, const DeltaChunkSpace& space,
                                              unsigned char* memory, uint32_t number) {
  using Stage = DeltaReplayStage<Shape>;
  const DeltaReplay<Shape> replay(p.in, space, memory + kWalkBytes<Shape, Stage> - Stage::kKeptBytes, number);
  walk_chunks<Shape, false>(replay, reinterpret_cast<Stage*>(memory), p.initial_state, nullptr);
}

template <typename Shape>
constexpr int kBothWalksBytes = kWalkBytes<Shape, DeltaReplayStage<Shape>> > kWalkBytes<Shape, DeltaReverseStage<Shape>>
                                    ? kWalkBytes<Shape, DeltaReplayStage<Shape>>
                                    : kWalkBytes<Shape, DeltaReverseStage<Shape>>;

// The first half of the blocks walk back, as that takes longer.
template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    delta_walks_kernel(const DeltaRuleBackwardParams p, int64_t chunks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  wait_for_inputs();
  const DeltaChunkSpace space(p.in, Shape::kKeys, chunks, p.workspace);
  const uint32_t walks = gridDim.x / 2;
  if (blockIdx.x < walks) {
    using Stage = DeltaReverseStage<Shape>;
    const DeltaReverse<Shape> reverse(p, space, memory + kWalkBytes<Shape, Stage> - Stage::kKeptBytes, blockIdx.x);
    walk_chunks<Shape, true>(reverse, reinterpret_cast<Stage*>(memory), p.grad_state, p.grad_initial_state);
  } else {
    replay_chunks<Shape>(p, space, memory, blockIdx.x - walks);
  }
}

}  // namespace flashinfer::cuda
