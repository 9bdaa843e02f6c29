// The delta rule for a few tokens on CUDA, as a step of decoding has them: nearly all that moves are the states.
//
// A block has 64 columns of a head's state in registers. Threads take four neighbours at a time from memory as a state
// lies there, along its rows or, where columns come first, along its columns. One pass over the state before its update
// gives both products, since S' q = S~' q + u (k' q).
#pragma once

#include <type_traits>

#include <flashinfer/cuda/delta_columns.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kStepColumns = 64, kStepThreads = 4 * kStepColumns, kStepWarps = kStepThreads / 32;
constexpr int64_t kStepTokens = 8;  // of a sequence, at most

// g and beta of a token as a step computes them of raw numbers.
struct StepGate {
  float a_log, dt_bias, beta_factor;
  bool raw_gate;

  __device__ __forceinline__ StepGate(const DeltaRuleParams& p, int64_t value_head)
      : a_log(p.a_log ? p.a_log[value_head] : 0.f),
        dt_bias(p.dt_bias ? p.dt_bias[value_head] : 0.f),
        beta_factor(static_cast<float>(p.beta_sigmoid)),
        raw_gate(p.a_log != nullptr) {}

  __device__ __forceinline__ float gate(float g) const {
    if (!raw_gate) return g;
    const float x = g + dt_bias;
    return -__expf(a_log) * (x > 20.f ? x : log1pf(__expf(x)));
  }
  __device__ __forceinline__ float beta(float beta) const {
    return beta_factor > 0.f ? beta_factor / (1.f + __expf(-beta)) : beta;
  }
};

// What a thread brings of a token: an element of q or k, one of v or beta, and gates. All are on their way before the
// first is waited for.
template <typename T, typename Tokens, bool kRowGate>
struct StepToken {
  static constexpr int kKeys = Tokens::kKeys;
  float key = 0, value = 0, gate = 0, row_gate = 0;

  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ __forceinline__ bool has_column(const DeltaRuleInputs& in, const DeltaBlock& block) {
    return block.slice * kStepColumns + thread() % kStepColumns < in.value_dim;
  }

  __device__ __forceinline__ void load(const DeltaRuleInputs& in, const DeltaBlock& block, int64_t t) {
    const int d = thread() % kKeys;
    const int64_t batch = block.tokens.batch, head = block.key_head, number = block.number(in, t);
    const int64_t column = block.slice * kStepColumns + thread() % kStepColumns;
    if (thread() < 2 * kKeys && d < in.key_dim)
      key = thread() < kKeys ? load_float<T>(in.q, in.q_strides.at(batch, t, head) + d)
                             : load_float<T>(in.k, in.k_strides.at(batch, t, head) + d);
    if (has_column(in, block)) {
      if (thread() < kStepColumns) {
        value = load_float<T>(in.v, in.v_strides.at(batch, t, block.value_head) + column);
      } else if (thread() < 2 * kStepColumns) {
        value = in.beta ? load_float<float>(in.beta, in.beta_is_vector ? number * in.value_dim + column : number) : 1.f;
      }
    }
    gate = in.g ? load_float<float>(in.g, number) : 0.f;
    if (kRowGate && thread() < kKeys && d < in.key_dim) row_gate = load_float<float>(in.gk, number * in.key_dim + d);
  }

  // All threads call this.
  __device__ __forceinline__ void put(Tokens& to, const DeltaRuleInputs& in, const DeltaBlock& block,
                                      const StepGate& raw) const {
    const int d = thread() % kKeys, c = thread() % kStepColumns;
    if (thread() < kKeys) {
      to.q[0][d] = key;
    } else if (thread() < 2 * kKeys) {
      to.k[0][d] = key;
    }
    if (thread() < kStepColumns) {
      to.v[0][c] = value;
    } else if (thread() < 2 * kStepColumns) {
      to.beta[0][c] = in.beta && has_column(in, block) ? raw.beta(value) : value;
    }
    if (thread() < (kRowGate ? kKeys : 1)) to.decay[0][d] = __expf((in.g ? raw.gate(gate) : 0.f) + row_gate);
    if (in.l2norm) to.normalise();
    __syncthreads();
  }
};

// Products of the warps' rows with k and q, and k' q of those rows, where columns are parted among warps.
struct StepSums {
  float of_k[kStepWarps][kStepColumns], of_q[kStepWarps][kStepColumns], kq[kStepWarps];
};

// A thread's part of a block's columns.
template <int kKeys, bool kVFirst>
struct StepState {
  static constexpr int kVectors = kKeys * kStepColumns / (4 * kStepThreads);
  static constexpr int kLanes = (kVFirst ? kKeys : kStepColumns) / 4;  // that have a line of memory
  static constexpr int kLines = kStepThreads / kLanes;                 // that all threads have at a time
  static_assert(kVectors * kLines == (kVFirst ? kStepColumns : kKeys), "lines are parted evenly");

  float at[kVectors][4];

  static __device__ __forceinline__ int in_line() { return static_cast<int>(threadIdx.x) % kLanes * 4; }
  static __device__ __forceinline__ int line(int j) { return j * kLines + static_cast<int>(threadIdx.x) / kLanes; }
  static __device__ __forceinline__ int row(int j) { return kVFirst ? in_line() : line(j); }
  static __device__ __forceinline__ int column(int j) { return kVFirst ? line(j) : in_line(); }
  static __device__ __forceinline__ bool is_there(const DeltaPlace& place, int j) {
    return row(j) < place.rows && column(j) < place.columns;
  }
  // Of the thread's first four elements, and how far apart all of them lie.
  static __device__ __forceinline__ int64_t start(const DeltaPlace& place) {
    return place.start + row(0) * place.row_stride + column(0) * place.column_stride;
  }
  static __device__ __forceinline__ int64_t step(const DeltaPlace& place) {
    return kLines * (kVFirst ? place.column_stride : place.row_stride);
  }

  template <typename S>
  __device__ __forceinline__ void load(const S* states, const DeltaPlace& place) {
    const S* from = states + start(place);
    Vec<S, 4> raw[kVectors];  // all are on their way before the first is waited for
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (is_there(place, j)) raw[j] = load_vec<S, 4>(from + j * step(place));
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (is_there(place, j)) raw[j].to_floats(at[j]);
  }
  // Zeros beyond the state, and for null.
  __device__ __forceinline__ void load(const void* states, DType dtype, const DeltaPlace& place) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) at[j][0] = at[j][1] = at[j][2] = at[j][3] = 0.f;
    if (states == nullptr) return;
    if (dtype == DType::kFloat32) return load(static_cast<const float*>(states), place);
    if (dtype == DType::kFloat16) return load(static_cast<const half_t*>(states), place);
    load(static_cast<const bfloat16_t*>(states), place);
  }

  template <typename S>
  __device__ __forceinline__ void store(S* states, const DeltaPlace& place) const {
    S* to = states + start(place);
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (is_there(place, j)) store_vec(to + j * step(place), Vec<S, 4>::from_floats(at[j]));
  }
  __device__ __forceinline__ void store(void* states, DType dtype, const DeltaPlace& place) const {
    if (dtype == DType::kFloat32) return store(static_cast<float*>(states), place);
    if (dtype == DType::kFloat16) return store(static_cast<half_t*>(states), place);
    store(static_cast<bfloat16_t*>(states), place);
  }

  // A token's part in the state. out(column, value) is called for each column by one thread. All threads call this.
  template <bool kRowGate, typename Tokens, typename Out>
  __device__ __forceinline__ void update(const Tokens& tokens, StepSums& sums, const Out& out) {
    const float *k = tokens.k[0], *q = tokens.q[0], *v = tokens.v[0], *beta = tokens.beta[0];
    const auto decay = [&](int row) { return tokens.decay[0][kRowGate ? row : 0]; };
    if constexpr (kVFirst) {
      float keys[4], queries[4], decays[4], kq = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        keys[c] = k[in_line() + c], queries[c] = q[in_line() + c], decays[c] = decay(in_line() + c);
        kq = fmaf(keys[c], queries[c], kq);
      }
      kq = lanes_sum<kLanes>(kq);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float of_k = 0, of_q = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          at[j][c] *= decays[c];
          of_k = fmaf(at[j][c], keys[c], of_k), of_q = fmaf(at[j][c], queries[c], of_q);
        }
        of_k = lanes_sum<kLanes>(of_k), of_q = lanes_sum<kLanes>(of_q);
        const float u = beta[line(j)] * (v[line(j)] - of_k);
#pragma unroll
        for (int c = 0; c < 4; ++c) at[j][c] = fmaf(keys[c], u, at[j][c]);
        if (in_line() == 0) out(line(j), fmaf(u, kq, of_q));
      }
    } else {
      float of_k[4] = {}, of_q[4] = {}, kq = 0;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const float key = k[line(j)], query = q[line(j)], factor = decay(line(j));
        kq = fmaf(key, query, kq);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          at[j][c] *= factor;
          of_k[c] = fmaf(at[j][c], key, of_k[c]), of_q[c] = fmaf(at[j][c], query, of_q[c]);
        }
      }
      static_assert(kLanes == 16, "a warp has two lines at a time");
      kq += __shfl_xor_sync(kAllLanes, kq, 16);
      const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        of_k[c] += __shfl_xor_sync(kAllLanes, of_k[c], 16), of_q[c] += __shfl_xor_sync(kAllLanes, of_q[c], 16);
        if (lane < 16) sums.of_k[warp][in_line() + c] = of_k[c], sums.of_q[warp][in_line() + c] = of_q[c];
        of_k[c] = of_q[c] = 0;
      }
      if (lane == 0) sums.kq[warp] = kq;
      kq = 0;
      __syncthreads();
#pragma unroll 2
      for (int w = 0; w < kStepWarps; ++w) {
        kq += sums.kq[w];
#pragma unroll
        for (int c = 0; c < 4; ++c) of_k[c] += sums.of_k[w][in_line() + c], of_q[c] += sums.of_q[w][in_line() + c];
      }
      float u[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) u[c] = beta[in_line() + c] * (v[in_line() + c] - of_k[c]);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const float key = k[line(j)];
#pragma unroll
        for (int c = 0; c < 4; ++c) at[j][c] = fmaf(key, u[c], at[j][c]);
      }
      if (line(0) == 0)
#pragma unroll
        for (int c = 0; c < 4; ++c) out(in_line() + c, fmaf(u[c], kq, of_q[c]));
    }
  }
};

template <typename T, int kKeys, bool kRowGate, bool kVFirst>
__global__ void __launch_bounds__(kStepThreads, 4) delta_step_kernel(const DeltaRuleParams p) {
  using Tokens = DeltaTokens<kKeys / 4, kStepColumns, 1, kRowGate>;
  __shared__ __align__(16) Tokens tokens;
  __shared__ __align__(16) StepSums sums;
  wait_for_inputs();
  const DeltaRuleInputs& in = p.in;
  const DeltaBlock block(in, kStepColumns);
  const int64_t slot = p.slots.data ? p.slots[block.sequence] : block.sequence;
  const int64_t to_slot = p.output_slots.data ? p.output_slots[block.sequence] : slot;
  const int64_t first = block.slice * kStepColumns, heads = in.num_value_heads;
  const auto put = [&](int64_t t, int column, float value) {
    if (first + column < in.value_dim)
      static_cast<T*>(p.o)[block.number(in, t) * in.value_dim + first + column] = from_float<T>(value);
  };
  if (slot < 0 || slot >= p.num_slots) {
    for (int64_t t = 0; t < in.num_tokens; ++t)
      if (threadIdx.x < kStepColumns) put(t, threadIdx.x, 0.f);
    return;
  }
  StepToken<T, Tokens, kRowGate> token;
  if (in.num_tokens > 0) token.load(in, block, 0);
  StepState<kKeys, kVFirst> state;
  state.load(p.initial_state, p.state_dtype, DeltaPlace(in, slot * heads + block.value_head, first));
  const StepGate gate(p, block.value_head);
  const float scale = static_cast<float>(in.scale.get());
  for (int64_t t = 0; t < in.num_tokens; ++t) {
    __syncthreads();
    token.put(tokens, in, block, gate);
    if (t + 1 < in.num_tokens) token.load(in, block, t + 1);
    state.template update<kRowGate>(tokens, sums, [&](int column, float value) { put(t, column, scale * value); });
    if (p.snapshots)
      state.store(p.snapshots, p.state_dtype,
                  DeltaPlace(in, (block.sequence * p.snapshot_rows + t) * heads + block.value_head, first));
  }
  if (p.final_state && to_slot >= 0 && to_slot < p.num_slots)
    state.store(p.final_state, p.state_dtype, DeltaPlace(in, to_slot * heads + block.value_head, first));
}

// Whether a sequence has few tokens, and four neighbours of a state are one access.
inline bool takes_step(const DeltaRuleParams& p) {
  const DeltaRuleInputs& in = p.in;
  if (in.num_tokens > kStepTokens || in.cu_seqlens.data || in.key_dim > 128) return false;
  if ((in.v_first ? in.key_dim : in.value_dim) % 4 != 0) return false;
  const int64_t bytes = 4 * size_of(p.state_dtype);
  for (const void* states :
       {p.initial_state, static_cast<const void*>(p.final_state), static_cast<const void*>(p.snapshots)})
    if (reinterpret_cast<uintptr_t>(states) % bytes != 0) return false;
  return true;
}

template <typename T>
void delta_step(const DeltaRuleParams& p, const Launch& where) {
  const auto blocks = static_cast<unsigned>(delta_blocks(p.in, kStepColumns));
  const auto run = [&](auto keys, auto row_gate, auto v_first) {
    launch(delta_step_kernel<T, keys(), row_gate(), v_first()>, blocks, kStepThreads, 0, where, p);
  };
  const auto with_gate = [&](auto keys, auto v_first) {
    p.in.gk ? run(keys, std::true_type{}, v_first) : run(keys, std::false_type{}, v_first);
  };
  const auto with_keys = [&](auto v_first) {
    p.in.key_dim <= 64 ? with_gate(std::integral_constant<int, 64>{}, v_first)
                       : with_gate(std::integral_constant<int, 128>{}, v_first);
  };
  p.in.v_first ? with_keys(std::true_type{}) : with_keys(std::false_type{});
}

}  // namespace flashinfer::cuda
