// Gradients of the token-by-token delta rule on CUDA, in the three passes of cpu/delta_rule/backward.h, which
// has the equations.
//
// A CTA has up to 128 columns of a value head's state, and writes its sums over these columns to a workspace.
// Two more kernels add the sums over slices of columns, heads of a group and tokens, in a fixed order without
// atomics.
#pragma once

#include <flashinfer/cuda/delta_rule/columns.cuh>
#include <flashinfer/cuda/delta_rule/recurrent/sums.cuh>

namespace flashinfer::cuda {

template <typename T, int kRows, bool kChannels>
struct DeltaGradient {
  static constexpr int kKeys = 4 * kRows, kColumns = kRows == 64 ? 64 : 128, kThreads = 4 * kColumns;
  using Tokens = DeltaTokens<kRows, kColumns, 4, kChannels>;
  using State = DeltaState<kRows>;

  struct Shared {
    Tokens tokens;
    DeltaColumnSums<kKeys, kColumns> partials[2];
  };

  const DeltaRuleBackwardParams& p;
  const DeltaRuleInputs& in;
  DeltaWork work;
  DeltaBackwardSums sums;
  Shared& shared;
  int64_t column;
  bool inside;
  float scale;

  __device__ __forceinline__ DeltaGradient(const DeltaRuleBackwardParams& params, Shared& shared_)
      : p(params),
        in(params.in),
        work(params.in, kColumns),
        sums(params.in, kColumns, params.workspace),
        shared(shared_),
        column(work.slice * kColumns + State::column()),
        inside(column < in.value_dim),
        scale(static_cast<float>(in.scale.get())) {}

  __device__ __forceinline__ int own_column() const { return State::column(); }
  __device__ __forceinline__ void load_state(State& state, const void* states) const {
    const int64_t start = work.head_index(in) * in.state_size() + column * in.column_stride();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool has = states && inside && State::row(i) < in.key_dim;
      state.at[i] = has ? load_float<float>(states, start + State::row(i) * in.row_stride()) : 0.f;
    }
  }
  __device__ __forceinline__ float scaled_grad(int64_t t) const {
    if (!p.grad_o || !inside) return 0.f;
    return scale * load_float<T>(p.grad_o, work.token_index(in, t) * in.value_dim + column);
  }
  __device__ __forceinline__ float& value_at(float* values, int64_t t) const {
    return values[work.token_index(in, t) * in.value_dim + column];
  }
  // Load tokens first to first + 3, and return how many belong to the sequence.
  __device__ __forceinline__ int stage(int64_t first) const {
    __syncthreads();
    shared.tokens.template load<T>(in, work, first, IdentityGate{});
    const int64_t left = work.tokens.end - first;
    return left < Tokens::kTokens ? static_cast<int>(left) : Tokens::kTokens;
  }

  // Compute r of every token again, and the last state.
  __device__ __forceinline__ void recompute(State& state) const {
    load_state(state, p.initial_state);
    for (int64_t first = work.tokens.begin; first < work.tokens.end; first += Tokens::kTokens) {
      const int count = stage(first);
      for (int i = 0; i < count; ++i) {
        float k[kRows];
        State::load_row(shared.tokens.k[i], k);
        state.template decay<kChannels>(shared.tokens.decay[i]);
        const float r = shared.tokens.v[i][own_column()] - state.dot(k);
        if (inside && State::part() == 0) value_at(sums.r, first + i) = r;
        state.add(k, shared.tokens.beta[i][own_column()] * r);
      }
    }
  }

  // Compute <dS, S> of each row of the last state.
  __device__ __forceinline__ void dot_last_states(const State& state, const State& grad) const {
    auto& partials = shared.partials[0];
    float products[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) products[i] = state.at[i] * grad.at[i];
    partials.store_rows(products);
    __syncthreads();
    const int64_t at = work.slice * sums.heads_of_states + work.head_index(in);
    if (kChannels)
      for (int d = threadIdx.x; d < in.key_dim; d += kThreads) sums.last_gk[at * in.key_dim + d] = partials.row(d);
    if (threadIdx.x < 32) {
      float total = 0;
      for (int d = threadIdx.x; d < kKeys; d += 32) total += partials.row(d);
      total = lanes_sum<32>(total);
      if (threadIdx.x == 0) sums.last_g[at] = total;
    }
  }

  __device__ __forceinline__ void backward_pass(State& grad) const {
    auto& partials = shared.partials[0];
    const int64_t length = work.tokens.end - work.tokens.begin;
    for (int64_t group = (length + Tokens::kTokens - 1) / Tokens::kTokens - 1; group >= 0; --group) {
      const int64_t first = work.tokens.begin + group * Tokens::kTokens;
      for (int i = stage(first) - 1; i >= 0; --i) {
        const int64_t t = first + i, number = work.token_index(in, t);
        const float r = inside ? value_at(sums.r, t) : 0.f, beta = shared.tokens.beta[i][own_column()], u = beta * r;
        float row[kRows];
        State::load_row(shared.tokens.q[i], row);
        grad.add(row, scaled_grad(t));
        float products[kRows];
#pragma unroll
        for (int j = 0; j < kRows; ++j) products[j] = grad.at[j] * u;
        partials.store_rows(products);
        State::load_row(shared.tokens.k[i], row);
        const float dy = grad.dot(row), dv = beta * dy;
        partials.store_scalars(dy * r, dv * shared.tokens.v[i][own_column()]);
        if (inside && State::part() == 0) {
          value_at(sums.dv, t) = dv;
          static_cast<T*>(p.grad_v)[number * in.value_dim + column] = from_float<T>(dv);
          if (p.grad_beta && in.beta_is_vector)
            static_cast<float*>(p.grad_beta)[number * in.value_dim + column] = dy * r;
        }
        grad.add(row, -dv);
        grad.template decay<kChannels>(shared.tokens.decay[i]);
        __syncthreads();
        const int64_t at = work.slice * sums.tokens + number;
        for (int d = threadIdx.x; d < in.key_dim; d += kThreads) {
          const float total = partials.row(d);
          sums.dk[at * in.key_dim + d] = total;
          if (kChannels) sums.gk[at * in.key_dim + d] = -shared.tokens.k[i][d] * total;
        }
        if (threadIdx.x == kThreads - 1) sums.dbeta[at] = partials.scalar_sum(0);
        if (threadIdx.x == kThreads - 2) sums.g[at] = -partials.scalar_sum(1);
        __syncthreads();
      }
    }
    const int64_t start = work.head_index(in) * in.state_size() + column * in.column_stride();
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (inside && State::row(i) < in.key_dim)
        static_cast<float*>(p.grad_initial_state)[start + State::row(i) * in.row_stride()] = grad.at[i];
  }

  __device__ __forceinline__ void forward_pass(State& state) const {
    load_state(state, p.initial_state);
    for (int64_t first = work.tokens.begin; first < work.tokens.end; first += Tokens::kTokens) {
      const int count = stage(first);
      for (int i = 0; i < count; ++i) {
        const int64_t t = first + i;
        const float r = inside ? value_at(sums.r, t) : 0.f, dv = inside ? value_at(sums.dv, t) : 0.f;
        float products[kRows];
        state.template decay<kChannels>(shared.tokens.decay[i]);
#pragma unroll
        for (int j = 0; j < kRows; ++j) products[j] = state.at[j] * dv;
        shared.partials[0].store_rows(products);
        float row[kRows];
        State::load_row(shared.tokens.k[i], row);
        state.add(row, shared.tokens.beta[i][own_column()] * r);
        const float go = scaled_grad(t);
#pragma unroll
        for (int j = 0; j < kRows; ++j) products[j] = state.at[j] * go;
        shared.partials[1].store_rows(products);
        __syncthreads();
        const int64_t at = (work.slice * sums.tokens + work.token_index(in, t)) * in.key_dim;
        for (int d = threadIdx.x; d < in.key_dim; d += kThreads) {
          const float read = shared.partials[0].row(d), dq = shared.partials[1].row(d);
          sums.dk[at + d] -= read;
          sums.dq[at + d] = dq;
          if (kChannels) sums.gk[at + d] += shared.tokens.q[i][d] * dq - shared.tokens.k[i][d] * read;
        }
        __syncthreads();
      }
    }
  }
};

template <typename T, int kRows, bool kChannels>
__global__ void __launch_bounds__(DeltaGradient<T, kRows, kChannels>::kThreads)
    delta_rule_backward_kernel(const DeltaRuleBackwardParams p) {
  using Gradient = DeltaGradient<T, kRows, kChannels>;
  __shared__ __align__(16) typename Gradient::Shared shared;
  const Gradient gradient(p, shared);
  typename Gradient::State state, grad;
  gradient.recompute(state);
  gradient.load_state(grad, p.grad_state);
  gradient.dot_last_states(state, grad);
  gradient.backward_pass(grad);
  gradient.forward_pass(state);
}

// Compute dq and dk of a token and head of q and k. A warp adds the sums of the group's heads and of the
// slices, then differentiates the normalisation: for y = x f, dx = f (dy - y <y, dy>). It adds <q, dq> of
// each value head to the terms of its gate.
template <typename T>
__global__ void delta_rule_rows_kernel(const DeltaRuleBackwardParams p, int columns) {
  const DeltaRuleInputs& in = p.in;
  const DeltaBackwardSums sums(in, columns, p.workspace);
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= in.batch_size * in.num_tokens * in.num_heads) return;
  const int lane = threadIdx.x % 32;
  const int64_t head = row % in.num_heads, token = row / in.num_heads, b = token / in.num_tokens,
                t = token % in.num_tokens;
  const T* q = static_cast<const T*>(in.q) + in.q_strides.at(b, t, head);
  const T* k = static_cast<const T*>(in.k) + in.k_strides.at(b, t, head);
  const auto element = [&](const T* x, int64_t d) { return d < in.key_dim ? to_float(x[d]) : 0.f; };
  float squares_q = 0, squares_k = 0;
  for (int64_t d = lane; d < in.key_dim; d += 32) {
    squares_q += element(q, d) * element(q, d);
    squares_k += element(k, d) * element(k, d);
  }
  const float norm_q = in.l2norm ? rsqrtf(lanes_sum<32>(squares_q) + 1e-6f) : 1.f;
  const float norm_k = in.l2norm ? rsqrtf(lanes_sum<32>(squares_k) + 1e-6f) : 1.f;
  float dq[8] = {}, dk[8] = {};  // covers 256 elements
  for (int64_t member = 0; member < in.group(); ++member) {
    const int64_t number = token * in.num_value_heads + head * in.group() + member;
    float q_dot = 0, value_gate = 0, beta = 0;
    for (int64_t slice = 0; slice < sums.slices; ++slice) {
      const int64_t at = slice * sums.tokens + number;
      value_gate += sums.g[at], beta += sums.dbeta[at];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int64_t d = lane + 32 * i;
        if (d >= in.key_dim) continue;
        const float grad = sums.dq[at * in.key_dim + d];
        dq[i] += grad, dk[i] += sums.dk[at * in.key_dim + d];
        q_dot += grad * norm_q * element(q, d);
        if (in.gk && slice > 0) sums.gk[number * in.key_dim + d] += sums.gk[at * in.key_dim + d];
      }
    }
    q_dot = lanes_sum<32>(q_dot);
    if (lane != 0) continue;
    sums.g[number] = q_dot + value_gate;
    if (p.grad_beta && !in.beta_is_vector) static_cast<float*>(p.grad_beta)[number] = beta;
  }
  float q_dots = 0, k_dots = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    q_dots += dq[i] * norm_q * element(q, lane + 32 * i);
    k_dots += dk[i] * norm_k * element(k, lane + 32 * i);
  }
  q_dots = in.l2norm ? lanes_sum<32>(q_dots) : 0.f, k_dots = in.l2norm ? lanes_sum<32>(k_dots) : 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t d = lane + 32 * i;
    if (d >= in.key_dim) continue;
    static_cast<T*>(p.grad_q)[row * in.key_dim + d] = from_float<T>(norm_q * (dq[i] - norm_q * element(q, d) * q_dots));
    static_cast<T*>(p.grad_k)[row * in.key_dim + d] = from_float<T>(norm_k * (dk[i] - norm_k * element(k, d) * k_dots));
  }
}

// Sum the gates of a sequence from the last token to the first, per value head, or with kChannels per
// channel. A warp takes 32 tokens at a time. With kChannels, a thread takes one channel.
template <bool kChannels>
__global__ void delta_rule_gates_kernel(const DeltaRuleBackwardParams p, int columns) {
  const DeltaRuleInputs& in = p.in;
  const DeltaBackwardSums sums(in, columns, p.workspace);
  const int64_t head = blockIdx.x, value_head = head % in.num_value_heads;
  const Sequence tokens = sequence_of(in, head / in.num_value_heads);
  const auto number = [&](int64_t t) { return (tokens.batch * in.num_tokens + t) * in.num_value_heads + value_head; };
  if constexpr (kChannels) {
    for (int64_t d = threadIdx.x; d < in.key_dim; d += blockDim.x) {
      float total = 0;
      for (int64_t slice = 0; slice < sums.slices; ++slice)
        total += sums.last_gk[(slice * sums.heads_of_states + head) * in.key_dim + d];
#pragma unroll 8
      for (int64_t t = tokens.end - 1; t >= tokens.begin; --t) {
        total += sums.gk[number(t) * in.key_dim + d];
        static_cast<float*>(p.grad_gk)[number(t) * in.key_dim + d] = total;
      }
    }
  } else {
    const int lane = threadIdx.x;
    float carried = 0;
    for (int64_t slice = 0; slice < sums.slices; ++slice) carried += sums.last_g[slice * sums.heads_of_states + head];
    for (int64_t last = tokens.end - 1; last >= tokens.begin; last -= 32) {
      const int64_t t = last - lane;
      float total = t >= tokens.begin ? sums.g[number(t)] : 0.f;
#pragma unroll
      for (int by = 1; by < 32; by *= 2) {
        const float other = __shfl_up_sync(kAllLanes, total, by);
        if (lane >= by) total += other;
      }
      total += carried;
      if (t >= tokens.begin) static_cast<float*>(p.grad_g)[number(t)] = total;
      carried = __shfl_sync(kAllLanes, total, 31);
    }
  }
}

template <typename T>
void delta_rule_backward(const DeltaRuleBackwardParams& p, const Launch& where) {
  const Launch serial{where.stream, where.device, 0};  // no PDL: each kernel reads the output of the previous one
  const DeltaRuleInputs& in = p.in;
  const int columns = delta_backward_columns(in);
  with_delta_shape(in, [&](auto rows, auto channels) {
    launch(delta_rule_backward_kernel<T, rows(), channels()>, static_cast<unsigned>(delta_blocks(in, columns)),
           4 * columns, serial, p);
  });
  const int64_t num_rows = in.batch_size * in.num_tokens * in.num_heads;
  launch(delta_rule_rows_kernel<T>, static_cast<unsigned>((num_rows + 7) / 8), 256, serial, p, columns);
  const auto heads = static_cast<unsigned>(in.num_sequences * in.num_value_heads);
  if (p.grad_g) launch(delta_rule_gates_kernel<false>, heads, 32, serial, p, columns);
  if (p.grad_gk) launch(delta_rule_gates_kernel<true>, heads, 128, serial, p, columns);
}

}  // namespace flashinfer::cuda
