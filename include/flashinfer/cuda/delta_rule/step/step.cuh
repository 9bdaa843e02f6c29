// The delta rule for a few tokens on CUDA, as in decoding. States are nearly all of the traffic.
// common/delta_rule.h has the equations.
//
// A CTA has 64 columns of a head's state in registers. A line is contiguous in memory: a row of the state, or
// a column if columns come first. A thread loads four adjacent elements of a line at a time. One pass over
// the state before its update gives both products, since S' q = S~' q + u (k' q). S~ is the decayed state, S
// the updated one, and ' the transpose. Each kernel reads and writes a state once. Loads and stores carry an
// evict-first hint: without it, a tenth more moves between L2 and memory.
#pragma once

#include <type_traits>

#include <flashinfer/cuda/delta_rule/columns.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kStepColumns = 64, kStepThreads = 4 * kStepColumns, kStepWarps = kStepThreads / 32;
constexpr int64_t kStepTokens = 8;  // of a sequence, at most

// Compute g, gk and beta of a token from raw values.
struct StepGate {
  const DeltaRuleParams& p;  // a reference to the kernel parameter, which stays in constant memory
  int value_head;
  float a_log, dt_bias;

  __device__ __forceinline__ StepGate(const DeltaRuleParams& params, int64_t head)
      : p(params),
        value_head(static_cast<int>(head)),
        a_log(params.a_log ? params.a_log[head] : 0.f),
        dt_bias(params.dt_bias && !params.raw_gk ? params.dt_bias[head] : 0.f) {}

  __device__ __forceinline__ float gate(float g) const { return p.a_log && !p.raw_gk ? logarithm(g + dt_bias) : g; }
  __device__ __forceinline__ float channel_gate(float g, int d) const {
    if (!p.raw_gk) return g;
    return logarithm(g + (p.dt_bias && d < p.in.key_dim ? p.dt_bias[value_head * p.in.key_dim + d] : 0.f));
  }
  // Return the logarithm of the decay.
  __device__ __forceinline__ float logarithm(float x) const {
    const float rate = __expf(a_log);
    if (p.lower_bound < 0.f) return p.lower_bound / (1.f + __expf(-rate * x));
    return -rate * (x > 20.f ? x : log1pf(__expf(x)));
  }
  __device__ __forceinline__ float beta(float beta) const {
    return p.beta_sigmoid ? static_cast<float>(p.beta_sigmoid) / (1.f + __expf(-beta)) : beta;
  }
};

// One token in smem.
template <int kKeys, bool kChannels>
struct StepSharedToken {
  alignas(16) float q[kKeys];
  float k[kKeys], decay[kChannels ? kKeys : 4], v[kStepColumns], beta[kStepColumns];
};
template <int kKeys, bool kChannels>
struct StepShared {
  // Double buffer: no barrier separates the reads of a token from the stores of the next one.
  StepSharedToken<kKeys, kChannels> tokens[2];
  alignas(16) float sums[2][kStepWarps][kStepColumns];  // per warp: S~' k and S~' q over its rows
  float u[kStepColumns];
};

// Elements of a token that a thread loads: one of q or k, one of v or beta, and gates. A thread issues all
// loads before it waits for the first.
template <typename T, int kKeys, bool kChannels>
struct StepToken {
  static_assert(kStepThreads >= 2 * kKeys && kStepThreads >= 2 * kStepColumns, "there is a thread for each element");
  float qk = 0, v_or_beta = 0, gate = 0, gk = 0;

  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }

  __device__ __forceinline__ void load(const DeltaRuleInputs& in, const DeltaWork& work, int64_t t) {
    const int d = thread() % kKeys;
    const int64_t batch = work.tokens.batch, head = work.key_head, number = work.token_index(in, t);
    const int64_t column = work.slice * kStepColumns + thread() % kStepColumns;
    if (thread() < 2 * kKeys && d < in.key_dim)
      qk = thread() < kKeys ? load_float<T>(in.q, in.q_strides.at(batch, t, head) + d)
                            : load_float<T>(in.k, in.k_strides.at(batch, t, head) + d);
    if (column < in.value_dim) {
      if (thread() < kStepColumns) {
        v_or_beta = load_float<T>(in.v, in.v_strides.at(batch, t, work.value_head) + column);
      } else if (thread() < 2 * kStepColumns) {
        v_or_beta =
            in.beta ? load_float<float>(in.beta, in.beta_is_vector ? number * in.value_dim + column : number) : 1.f;
      }
    }
    gate = in.g ? load_float<float>(in.g, number) : 0.f;
    if (kChannels && thread() < kKeys && d < in.key_dim) gk = load_float<float>(in.gk, number * in.key_dim + d);
  }

  // Store the token to smem and return the decay that all rows share.
  __device__ __forceinline__ float store(StepSharedToken<kKeys, kChannels>& to, const DeltaRuleInputs& in,
                                         const StepGate& raw) const {
    const int d = thread() % kKeys, c = thread() % kStepColumns;
    if (thread() < kKeys) {
      to.q[d] = qk;
    } else if (thread() < 2 * kKeys) {
      to.k[d] = qk;
    }
    if (thread() < kStepColumns) {
      to.v[c] = v_or_beta;
    } else if (thread() < 2 * kStepColumns) {
      to.beta[c] = in.beta ? raw.beta(v_or_beta) : v_or_beta;
    }
    const float common_decay = __expf(in.g ? raw.gate(gate) : 0.f);
    if (kChannels && thread() < kKeys) to.decay[d] = common_decay * __expf(raw.channel_gate(gk, d));
    return common_decay;
  }
};

// Normalisation factors of k and q, and k' q. Every warp computes all of them.
template <int kKeys>
struct StepNorms {
  float k_factor = 1, q_factor = 1, kq = 0;

  __device__ __forceinline__ StepNorms(const float* k, const float* q, bool l2norm) {
    float kk = 0, qq = 0;
#pragma unroll
    for (int d = threadIdx.x % 32; d < kKeys; d += 32)
      kq = fmaf(k[d], q[d], kq), kk = fmaf(k[d], k[d], kk), qq = fmaf(q[d], q[d], qq);
    kq = lanes_sum<32>(kq);
    if (!l2norm) return;
    k_factor = rsqrtf(lanes_sum<32>(kk) + 1e-6f), q_factor = rsqrtf(lanes_sum<32>(qq) + 1e-6f);
    kq *= k_factor * q_factor;
  }
};

// A thread's part of the CTA's columns.
template <int kKeys, bool kChannels, bool kVFirst>
struct StepState {
  static constexpr int kVectors = kKeys * kStepColumns / (4 * kStepThreads);
  static constexpr int kLanes = (kVFirst ? kKeys : kStepColumns) / 4;  // per line
  static constexpr int kLines = kStepThreads / kLanes;                 // of all threads at a time
  static_assert(kVectors * kLines == (kVFirst ? kStepColumns : kKeys), "threads share lines evenly");
  using SharedToken = StepSharedToken<kKeys, kChannels>;
  using Norms = StepNorms<kKeys>;

  float state[kVectors][4];

  static __device__ __forceinline__ int in_line() { return static_cast<int>(threadIdx.x) % kLanes * 4; }
  static __device__ __forceinline__ int line(int j) { return j * kLines + static_cast<int>(threadIdx.x) / kLanes; }

  // Lines of a thread, for columns from `first` on. start: offset of its first element. left: lines that
  // exist from the thread's first line on; 0 if its elements lie outside.
  struct Lines {
    int start, stride, left;

    __device__ __forceinline__ Lines(const DeltaRuleInputs& in, int64_t first)
        : stride(static_cast<int>(kVFirst ? in.key_dim : in.value_dim)) {
      const auto rows = static_cast<int>(in.key_dim), columns = static_cast<int>(in.value_dim - first);
      start = line(0) * stride + in_line();
      left = in_line() < (kVFirst ? rows : columns) ? (kVFirst ? columns : rows) - line(0) : 0;
    }
    __device__ __forceinline__ bool has(int j) const { return j * kLines < left; }
    __device__ __forceinline__ int offset(int j) const { return start + j * kLines * stride; }
  };

  // Load columns that begin at element `first` of a tensor of states. Elements beyond them are zeros, and so
  // is a null state.
  __device__ __forceinline__ void load(const void* states, DType dtype, int64_t first, const Lines& lines) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) state[j][0] = state[j][1] = state[j][2] = state[j][3] = 0.f;
    if (states == nullptr) return;
    if (dtype == DType::kFloat32) return load(static_cast<const float*>(states) + first, lines);
    if (dtype == DType::kFloat16) return load(static_cast<const half_t*>(states) + first, lines);
    load(static_cast<const bfloat16_t*>(states) + first, lines);
  }
  __device__ __forceinline__ void store(void* states, DType dtype, int64_t first, const Lines& lines) const {
    if (dtype == DType::kFloat32) return store(static_cast<float*>(states) + first, lines);
    if (dtype == DType::kFloat16) return store(static_cast<half_t*>(states) + first, lines);
    store(static_cast<bfloat16_t*>(states) + first, lines);
  }

  // Update the state with a token. Rows decay by `decay`, or by the token's decays per channel. One thread per column
  // calls out(column, value). All threads call this after a barrier that publishes the token.
  template <typename Out>
  __device__ __forceinline__ void update(StepShared<kKeys, kChannels>& shared, const SharedToken& token, float decay,
                                         bool l2norm, const Out& out) {
    const Norms norms(token.k, token.q, l2norm);
    if constexpr (kVFirst) {
      update_columns(token, decay, norms, out);
    } else {
      update_rows(shared, token, decay, norms, out);
    }
  }

 private:
  template <typename S>
  __device__ __forceinline__ void load(const S* from, const Lines& lines) {
    Vec<S, 4> raw[kVectors];  // all loads are issued before the first is waited for
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (lines.has(j)) raw[j] = load_vec_once<S, 4>(from + lines.offset(j));
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (lines.has(j)) raw[j].to_floats(state[j]);
  }
  template <typename S>
  __device__ __forceinline__ void store(S* to, const Lines& lines) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (lines.has(j)) store_vec_once(to + lines.offset(j), Vec<S, 4>::from_floats(state[j]));
  }

  // Columns first: the lanes of a warp divide a column, so shuffles sum the products.
  template <typename Out>
  __device__ __forceinline__ void update_columns(const SharedToken& token, float decay, const Norms& norms,
                                                 const Out& out) {
    float keys[4], queries[4], decays[4] = {decay, decay, decay, decay}, sums[2 * kVectors];  // of k, then of q
    load_floats(keys, token.k + in_line()), load_floats(queries, token.q + in_line());
    if constexpr (kChannels) load_floats(decays, token.decay + in_line());
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      sums[j] = sums[kVectors + j] = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        state[j][c] *= decays[c];
        sums[j] = fmaf(state[j][c], keys[c], sums[j]),
        sums[kVectors + j] = fmaf(state[j][c], queries[c], sums[kVectors + j]);
      }
    }
    constexpr int kLanesPerSum = kLanes / (2 * kVectors);  // lanes that hold the same sum
    static_assert(kLanesPerSum >= 1, "there is a lane for each sum");
    scattered_lane_sums<kLanes, 2 * kVectors>(sums);
    const int lane = static_cast<int>(threadIdx.x) % kLanes, own_line = line(lane / kLanesPerSum % kVectors);
    const float u = token.beta[own_line] * (token.v[own_line] - norms.k_factor * sums[0]);
    const float column_u = __shfl_xor_sync(kAllLanes, u, kLanes / 2);
    if (lane >= kLanes / 2 && lane % kLanesPerSum == 0)
      out(own_line, fmaf(column_u, norms.kq, norms.q_factor * sums[0]));
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float added = norms.k_factor * __shfl_sync(kAllLanes, u, j * kLanesPerSum, kLanes);
#pragma unroll
      for (int c = 0; c < 4; ++c) state[j][c] = fmaf(keys[c], added, state[j][c]);
    }
  }

  // Rows first: the warps divide a column, so the products are summed in smem.
  template <typename Out>
  __device__ __forceinline__ void update_rows(StepShared<kKeys, kChannels>& shared, const SharedToken& token,
                                              float decay, const Norms& norms, const Out& out) {
    float k_products[4] = {}, q_products[4] = {};
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float key = token.k[line(j)], query = token.q[line(j)], factor = kChannels ? token.decay[line(j)] : decay;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        state[j][c] *= factor;
        k_products[c] = fmaf(state[j][c], key, k_products[c]), q_products[c] = fmaf(state[j][c], query, q_products[c]);
      }
    }
    static_assert(kLanes == 16, "a warp has two lines at a time");
    const int warp = static_cast<int>(threadIdx.x) / 32, half = static_cast<int>(threadIdx.x) / 16 % 2;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      k_products[c] += __shfl_xor_sync(kAllLanes, k_products[c], 16),
          q_products[c] += __shfl_xor_sync(kAllLanes, q_products[c], 16);
      if (half == 1) k_products[c] = q_products[c];
    }
    store_floats(&shared.sums[half][warp][in_line()], k_products);
    __syncthreads();
    const int column = static_cast<int>(threadIdx.x) % kStepColumns,
              product = static_cast<int>(threadIdx.x) / kStepColumns;
    float sum = 0;
    if (product < 2) {
#pragma unroll
      for (int w = 0; w < kStepWarps; ++w) sum += shared.sums[product][w][column];
    }
    if (product == 0) shared.u[column] = token.beta[column] * (token.v[column] - norms.k_factor * sum);
    __syncthreads();
    if (product == 1) out(column, fmaf(shared.u[column], norms.kq, norms.q_factor * sum));
    float added[4];
    load_floats(added, shared.u + in_line());
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float key = norms.k_factor * token.k[line(j)];
#pragma unroll
      for (int c = 0; c < 4; ++c) state[j][c] = fmaf(key, added[c], state[j][c]);
    }
  }
};

template <typename T, int kKeys, bool kChannels, bool kVFirst>
__global__ void __launch_bounds__(kStepThreads, 4) delta_step_kernel(const DeltaRuleParams p) {
  using State = StepState<kKeys, kChannels, kVFirst>;
  __shared__ StepShared<kKeys, kChannels> shared;
  wait_for_inputs();
  const DeltaRuleInputs& in = p.in;
  const DeltaWork work(in, kStepColumns);
  const int64_t slot = p.slots.data ? p.slots[work.sequence] : work.sequence;
  const int64_t output_slot = p.output_slots.data ? p.output_slots[work.sequence] : slot;
  const int64_t first = work.slice * kStepColumns;
  const auto store_output = [&](int64_t t, int column, float value) {
    if (first + column < in.value_dim)
      static_cast<T*>(p.o)[work.token_index(in, t) * in.value_dim + first + column] = from_float<T>(value);
  };
  if (slot < 0 || slot >= p.num_slots) {
    for (int64_t t = 0; t < in.num_tokens; ++t)
      if (threadIdx.x < kStepColumns) store_output(t, threadIdx.x, 0.f);
    return;
  }
  // Return the offset of the CTA's columns in entry `number` of a contiguous tensor [n, HV, ...] of states.
  const auto start_of = [&](int64_t number) {
    return (number * in.num_value_heads + work.value_head) * in.state_size() + first * in.column_stride();
  };
  StepToken<T, kKeys, kChannels> token;
  if (in.num_tokens > 0) token.load(in, work, 0);
  const typename State::Lines lines(in, first);
  State state;
  state.load(p.initial_slot(slot), p.state_dtype, start_of(0), lines);
  const StepGate gate(p, work.value_head);
  const float scale = static_cast<float>(in.scale.get());
  for (int64_t t = 0; t < in.num_tokens; ++t) {
    auto& shared_token = shared.tokens[t % 2];
    const float decay = token.store(shared_token, in, gate);
    __syncthreads();
    if (t + 1 < in.num_tokens) token.load(in, work, t + 1);
    state.update(shared, shared_token, decay, in.l2norm,
                 [&](int column, float value) { store_output(t, column, scale * value); });
    if (p.snapshots) state.store(p.snapshots, p.state_dtype, start_of(work.sequence * p.snapshot_rows + t), lines);
  }
  if (p.final_state && output_slot >= 0 && output_slot < p.num_slots)
    state.store(p.final_slot(output_slot), p.state_dtype, start_of(0), lines);
}

// Return true if the call has few tokens, and a thread can load four adjacent elements of a state at once.
inline bool supports_step(const DeltaRuleParams& p) {
  const DeltaRuleInputs& in = p.in;
  if (in.num_tokens > kStepTokens || in.cu_seqlens.data || in.key_dim > 128) return false;
  if ((in.v_first ? in.key_dim : in.value_dim) % 4 != 0) return false;
  const int64_t bytes = 4 * size_of(p.state_dtype);
  if (p.slot_bytes % bytes != 0) return false;
  for (const void* states :
       {p.initial_state, static_cast<const void*>(p.final_state), static_cast<const void*>(p.snapshots)})
    if (reinterpret_cast<uintptr_t>(states) % bytes != 0) return false;
  return true;
}

template <typename T>
void delta_step(const DeltaRuleParams& p, const Launch& where) {
  const auto blocks = static_cast<unsigned>(delta_blocks(p.in, kStepColumns));
  const auto run = [&](auto keys, auto channels, auto v_first) {
    launch(delta_step_kernel<T, keys(), channels(), v_first()>, blocks, kStepThreads, where, p);
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
