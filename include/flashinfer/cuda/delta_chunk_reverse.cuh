// The states and residuals of all chunks again, and the gradients of states from the last chunk to the first. With D
// the gradient of the state behind a chunk:
//   du = P' dO + e^(Gn-G) K D    dy = du - Z' (B du)    dR = B dy = dV    D = e^Gn D + scale Q' (e^G dO) - K' (e^G dR)
// Both leave behind, as operands of the kernel that follows, what a chunk begins with.
#pragma once

#include <flashinfer/cuda/delta_chunk_walk.cuh>

namespace flashinfer::cuda {

// What chunks and value heads leave behind, in order. Of states, blocks [columns / 16, kKeys / 16]; of residuals, r
// transposed, blocks [columns / 16, 4]. The columns fill whole slices of 64.
struct DeltaChunkSpace {
  int64_t strips, state_bytes, residual_bytes;
  DeltaTerms* terms;
  char *states, *grads, *residuals;
  float* betas;  // [strips, 64]: <dy, r> over the columns of a strip
  char* end;

  FLASHINFER_HD DeltaChunkSpace(const DeltaRuleInputs& in, int keys, int64_t chunks, void* workspace)
      : strips((in.value_dim + 63) / 64 * 4),
        state_bytes(strips * keys / 16 * 512),
        residual_bytes(strips * kDeltaChunk / 16 * 512) {
    const int64_t count = chunks * in.num_value_heads;
    char* next = static_cast<char*>(workspace);
    terms = reinterpret_cast<DeltaTerms*>(next), next += count * sizeof(DeltaTerms);
    states = next, next += count * state_bytes;
    grads = next, next += count * state_bytes;
    residuals = next, next += count * residual_bytes;
    betas = reinterpret_cast<float*>(next), next += count * strips * kDeltaChunk * 4;
    end = next;
  }
};

template <typename Shape>
struct DeltaReplayStage {
  alignas(1024) typename Shape::Keys k;
  alignas(128) typename Shape::Values v;
  typename Shape::Terms terms;
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

  __device__ __forceinline__ DeltaReplay(const DeltaRuleInputs& inputs, const DeltaChunkSpace& to)
      : Base(inputs), space(to) {}

  __device__ __forceinline__ void load(Stage& to, int64_t number) const {
    const DeltaChunk chunk = this->chunk(number);
    this->copy_keys(to.k, in.k, in.k_strides, chunk);
    this->copy_values(to.v, in.v, in.v_strides, chunk);
    this->copy_terms(to.terms, space.terms[this->place(number)]);
  }

  __device__ __forceinline__ void advance(Stage& stage, int64_t number, State& state) const {
    const auto& terms = stage.terms;
    typename Base::StateLeft a;
    typename Base::Sums r;
    typename Base::Left left;
    this->pack_state(a, state);
    this->start_residuals(r, left, a, stage);
    const int64_t strip = this->column() / 16, place = this->place(number);
    const bool kept = strip < space.strips;
    if (kept) store_blocks(space.states + place * space.state_bytes + strip * sizeof(a) * 32, a);
    state.scale(terms.last[0]);
    Products::template wait<0>(r, left);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) pack_left<T>(left[m], r[0][2 * m], r[0][2 * m + 1]);
    if (kept) store_blocks(space.residuals + place * space.residual_bytes + strip * sizeof(left) * 32, left);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) this->scale_tokens(r, m, terms.beta);
    this->scaled(left, r, terms.write);
    Products::write(state, left, stage.k);
    Products::template wait<0>(state, left);
  }
};

template <typename Shape>
struct DeltaReverseStage {
  alignas(1024) typename Shape::Keys k;
  alignas(1024) typename Shape::Keys q;
  alignas(128) typename Shape::Values grad;  // dO, then dV
  alignas(128) DeltaBlocks r[Shape::kWarps][kDeltaChunk / 16];
  typename Shape::Terms terms;
};

template <typename Shape>
struct DeltaReverse : DeltaWalk<Shape> {
  using Base = DeltaWalk<Shape>;
  using T = typename Shape::T;
  using Stage = DeltaReverseStage<Shape>;
  using State = typename Base::State;
  using Products = typename Shape::Products;
  using Base::in, Base::kSteps, Base::lane, Base::warp;

  const DeltaRuleBackwardParams& p;
  const DeltaChunkSpace& space;

  __device__ __forceinline__ DeltaReverse(const DeltaRuleBackwardParams& params, const DeltaChunkSpace& to)
      : Base(params.in), p(params), space(to) {}

  __device__ __forceinline__ void load(Stage& to, int64_t number) const {
    const DeltaChunk chunk = this->chunk(number);
    const int64_t place = this->place(number), heads = in.num_value_heads, values = in.value_dim;
    this->copy_keys(to.k, in.k, in.k_strides, chunk);
    this->copy_keys(to.q, in.q, in.q_strides, chunk);
    this->copy_values(to.grad, p.grad_o, {in.num_tokens * heads * values, heads * values, values}, chunk);
    const int64_t first = this->block.slice * Shape::kWarps, left = space.strips - first;
    const auto strips = static_cast<uint32_t>(left < Shape::kWarps ? left : Shape::kWarps);
    this->copy_bytes(to.r, space.residuals + place * space.residual_bytes + first * sizeof(to.r[0]),
                     strips * static_cast<uint32_t>(sizeof(to.r[0])));
    this->copy_terms(to.terms, space.terms[place]);
  }

  __device__ __forceinline__ void advance(Stage& stage, int64_t number, State& state) const {
    const auto& terms = stage.terms;
    const int64_t strip = this->column() / 16, place = this->place(number);
    const bool kept = strip < space.strips;
    typename Base::StateLeft a;
    typename Base::Sums du, of_outputs;
    typename Base::Left grad, left;
    this->pack_state(a, state);
    Products::read(du, a, stage.k);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) this->load_values(grad[m], stage.grad, m);
    Products::template multiply<false, true>(of_outputs, grad, terms.p);
    Products::template wait<1>(du, a);
    if (kept) store_blocks(space.grads + place * space.state_bytes + strip * sizeof(a) * 32, a);
    Products::template wait<0>(of_outputs, grad);
#pragma unroll
    for (int n = 0; n < Base::Sums::kN; ++n) {
      const float2 by = this->of_tokens(terms.write, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) du[0][n][i] = du[0][n][i] * (i % 2 ? by.y : by.x) + of_outputs[0][n][i];
    }
    this->scaled(left, du, terms.beta);
    Products::template multiply<false>(du, left, terms.z);  // dy
    state.scale(terms.last[0]);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 by = this->of_tokens(terms.out, 2 * m + i / 2);
        float low, high;
        unpack<T>(grad[m][i], low, high);
        grad[m][i] = pack<T>(low * by.x, high * by.y);
      }
    }
    Products::write(state, grad, stage.q);
    Products::template wait<1>(du, left);
    if (kept) give_beta(stage, space.betas + (place * space.strips + strip) * kDeltaChunk, du);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      this->scale_tokens(du, m, terms.beta);
      this->scaled(left[m], du, m, terms.read, -1.f);
    }
    Products::write(state, left, stage.k);
    this->store(p.grad_v, stage.grad, this->chunk(number), du);
    Products::template wait<0>(state, grad, left);
  }

 private:
  // <dy, r> of each token over this warp's columns.
  __device__ __forceinline__ void give_beta(const Stage& stage, float* to, const typename Base::Sums& dy) const {
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t r[4];
      load_block<false>(r, ptx::shared_address(stage.r[warp][m]));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto& mine = dy[0][2 * m + half];
        float upper[2], lower[2];
        unpack<T>(r[2 * half], upper[0], upper[1]), unpack<T>(r[2 * half + 1], lower[0], lower[1]);
        float2 sums = make_float2(mine[0] * upper[0] + mine[2] * lower[0], mine[1] * upper[1] + mine[3] * lower[1]);
#pragma unroll
        for (int by = 4; by < 32; by *= 2) {
          sums.x += __shfl_xor_sync(kAllLanes, sums.x, by);
          sums.y += __shfl_xor_sync(kAllLanes, sums.y, by);
        }
        if (lane < 4) *reinterpret_cast<float2*>(to + 8 * (2 * m + half) + 2 * lane) = sums;
      }
    }
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    delta_replay_kernel(const DeltaRuleBackwardParams p, int64_t chunks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  wait_for_inputs();
  const DeltaChunkSpace space(p.in, Shape::kKeys, chunks, p.workspace);
  walk_chunks<Shape, false>(DeltaReplay<Shape>(p.in, space), reinterpret_cast<DeltaReplayStage<Shape>*>(memory),
                            p.initial_state, nullptr);
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    delta_reverse_kernel(const DeltaRuleBackwardParams p, int64_t chunks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  wait_for_inputs();
  const DeltaChunkSpace space(p.in, Shape::kKeys, chunks, p.workspace);
  walk_chunks<Shape, true>(DeltaReverse<Shape>(p, space), reinterpret_cast<DeltaReverseStage<Shape>*>(memory),
                           p.grad_state, p.grad_initial_state);
}

}  // namespace flashinfer::cuda
