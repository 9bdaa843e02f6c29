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
  alignas(128) typename Shape::Keys k;
  alignas(128) typename Shape::Values v;
  alignas(128) DeltaTerms terms;
};

template <typename Shape>
struct DeltaReplay : DeltaWalk<Shape> {
  using Base = DeltaWalk<Shape>;
  using T = typename Shape::T;
  using Stage = DeltaReplayStage<Shape>;
  using State = typename Base::State;
  using Base::in, Base::kSteps;

  const DeltaChunkSpace& space;

  __device__ __forceinline__ DeltaReplay(const DeltaRuleInputs& inputs, const DeltaChunkSpace& to)
      : Base(inputs), space(to) {}

  __device__ __forceinline__ void load(Stage& to, int64_t number) const {
    const DeltaChunk chunk = this->chunk(number);
    this->copy_keys(to.k, in.k, in.k_strides, chunk);
    this->copy_values(to.v, in.v, in.v_strides, chunk);
    this->copy_bytes(&to.terms, space.terms + this->place(number), kDeltaForwardTerms);
  }

  __device__ __forceinline__ void advance(Stage& stage, int64_t number, State& state) const {
    const DeltaTerms& terms = stage.terms;
    const int64_t strip = this->column() / 16, place = this->place(number);
    const bool kept = strip < space.strips;
    typename Base::Sums r;
    r.clear();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      uint32_t a[1][4];
      pack_left<T>(a[0], state[0][2 * step], state[0][2 * step + 1]);
      if (kept)
        store_block(space.states + place * space.state_bytes + (strip * (Shape::kKeys / 16) + step) * 512, a[0]);
      this->read(r, a, stage.k, step);
    }
    this->subtract_from_values(r, stage.v, terms.read);
    typename Base::Left left;
#pragma unroll
    for (int m = 0; m < kSteps; ++m) this->scaled(left[m][0], r, m, terms.beta);
    this->template multiply<true>(r, left, terms.z);
    state.scale(terms.last[0]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[1][4];
      pack_left<T>(a[0], r[0][2 * step], r[0][2 * step + 1]);
      if (kept) store_block(space.residuals + place * space.residual_bytes + (strip * kSteps + step) * 512, a[0]);
      this->scale_tokens(r, step, terms.beta);
      this->scaled(a[0], r, step, terms.write);
      this->write(state, a, stage.k, step);
    }
  }
};

template <typename Shape>
struct DeltaReverseStage {
  alignas(128) typename Shape::Keys k;
  alignas(128) typename Shape::Keys q;
  alignas(128) typename Shape::Values grad;  // dO, then dV
  alignas(128) DeltaBlocks r[Shape::kWarps][kDeltaChunk / 16];
  alignas(128) DeltaTerms terms;
};

template <typename Shape>
struct DeltaReverse : DeltaWalk<Shape> {
  using Base = DeltaWalk<Shape>;
  using T = typename Shape::T;
  using Stage = DeltaReverseStage<Shape>;
  using State = typename Base::State;
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
    this->copy_bytes(&to.terms, space.terms + place, kDeltaForwardTerms);
  }

  __device__ __forceinline__ void advance(Stage& stage, int64_t number, State& state) const {
    const DeltaTerms& terms = stage.terms;
    const int64_t strip = this->column() / 16, place = this->place(number);
    const bool kept = strip < space.strips;
    typename Base::Sums du;
    du.clear();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      uint32_t a[1][4];
      pack_left<T>(a[0], state[0][2 * step], state[0][2 * step + 1]);
      if (kept) store_block(space.grads + place * space.state_bytes + (strip * (Shape::kKeys / 16) + step) * 512, a[0]);
      this->read(du, a, stage.k, step);
    }
    typename Base::Left grad, left;
#pragma unroll
    for (int m = 0; m < kSteps; ++m)
      this->scale_tokens(du, m, terms.write), this->load_values(grad[m][0], stage.grad, m);
    this->template multiply<false>(du, grad, terms.p);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) this->scaled(left[m][0], du, m, terms.beta);
    this->template multiply<false>(du, left, terms.z);  // dy
    if (kept) give_beta(stage, space.betas + (place * space.strips + strip) * kDeltaChunk, du);
    state.scale(terms.last[0]);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      uint32_t a[1][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 by = this->of_tokens(terms.out, 2 * m + i / 2);
        float low, high;
        unpack<T>(grad[m][0][i], low, high);
        a[0][i] = pack<T>(low * by.x, high * by.y);
      }
      this->write(state, a, stage.q, m);
      this->scale_tokens(du, m, terms.beta);
      this->scaled(a[0], du, m, terms.read, -1.f);
      this->write(state, a, stage.k, m);
    }
    this->store(p.grad_v, stage.grad, this->chunk(number), du);
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
__global__ void __launch_bounds__(Shape::kThreads)
    delta_replay_kernel(const DeltaRuleBackwardParams p, int64_t chunks) {
  extern __shared__ __align__(128) unsigned char memory[];
  wait_for_inputs();
  const DeltaChunkSpace space(p.in, Shape::kKeys, chunks, p.workspace);
  run_walk<Shape, false>(DeltaReplay<Shape>(p.in, space), reinterpret_cast<DeltaReplayStage<Shape>*>(memory),
                         p.initial_state, nullptr);
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    delta_reverse_kernel(const DeltaRuleBackwardParams p, int64_t chunks) {
  extern __shared__ __align__(128) unsigned char memory[];
  wait_for_inputs();
  const DeltaChunkSpace space(p.in, Shape::kKeys, chunks, p.workspace);
  run_walk<Shape, true>(DeltaReverse<Shape>(p, space), reinterpret_cast<DeltaReverseStage<Shape>*>(memory),
                        p.grad_state, p.grad_initial_state);
}

}  // namespace flashinfer::cuda
