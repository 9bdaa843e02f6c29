// Shared parts of the CUDA kernels of the delta rule: tokens in smem as floats, columns of a state in smem,
// and DeltaState, the layout of the recurrent gradients.
//
// In this layout, four threads share a column of the state, in registers. Thread p has rows 16 j + 4 p to
// 16 j + 4 p + 3 for each j. A warp reads the rows of a token from smem in words of 16 bytes, broadcast to
// its eight columns.
#pragma once

#include <type_traits>

#include <flashinfer/common/delta_rule.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

// Work of a CTA: some columns of a value head of a sequence. CTAs and heads are counted in 32 bits, because
// 64-bit divisions are slow.
struct DeltaWork {
  int64_t sequence, value_head, key_head, slice;
  Sequence tokens;

  __device__ __forceinline__ DeltaWork(const DeltaRuleInputs& in, int columns, uint32_t block = blockIdx.x) {
    const auto slices = static_cast<uint32_t>((in.value_dim + columns - 1) / columns);
    const auto heads = static_cast<uint32_t>(in.num_value_heads), key_heads = static_cast<uint32_t>(in.num_heads);
    const uint32_t global_head = block / slices, sequence_number = global_head / heads;
    const uint32_t head = global_head - sequence_number * heads;
    slice = block - global_head * slices;
    value_head = head;
    key_head = head / (heads / key_heads);
    sequence = sequence_number;
    tokens = sequence_of(in, sequence);
  }
  // Index of the value head among the heads of all sequences.
  __device__ __forceinline__ int64_t head_index(const DeltaRuleInputs& in) const {
    return sequence * in.num_value_heads + value_head;
  }
  // Index of a token and value head in contiguous tensors [B, T, HV, ...].
  __device__ __forceinline__ int64_t token_index(const DeltaRuleInputs& in, int64_t t) const {
    return (tokens.batch * in.num_tokens + t) * in.num_value_heads + value_head;
  }
};

inline int64_t delta_blocks(const DeltaRuleInputs& in, int columns) {
  return in.num_sequences * in.num_value_heads * ((in.value_dim + columns - 1) / columns);
}

template <typename T>
__device__ __forceinline__ float load_float(const void* from, int64_t i) {
  return to_float(static_cast<const T*>(from)[i]);
}

// Load contiguous floats of a lane.
template <int kCount>
__device__ __forceinline__ void load_floats(float (&to)[kCount], const float* from) {
#pragma unroll
  for (int i = 0; i < kCount; i += kCount < 4 ? 2 : 4) {
    if constexpr (kCount < 4) {
      const float2 two = *reinterpret_cast<const float2*>(from + i);
      to[i] = two.x, to[i + 1] = two.y;
    } else {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
  }
}
template <int kCount>
__device__ __forceinline__ void store_floats(float* to, const float (&from)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += kCount < 4 ? 2 : 4) {
    if constexpr (kCount < 4) {
      *reinterpret_cast<float2*>(to + i) = make_float2(from[i], from[i + 1]);
    } else {
      *reinterpret_cast<float4*>(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
    }
  }
}

// Gates that the caller has computed. StepGate of step/step.cuh computes them from raw values.
struct IdentityGate {
  __device__ __forceinline__ float gate(float g) const { return g; }
  __device__ __forceinline__ float channel_gate(float g, int) const { return g; }
  __device__ __forceinline__ float beta(float beta) const { return beta; }
};

// A group of tokens of a head in smem. Tokens after the end of the sequence are zeros with decay 1.
template <int kRows_, int kColumns_, int kTokens_, bool kChannels, int kThreads_ = 4 * kColumns_>
struct DeltaTokens {
  static constexpr int kRows = kRows_, kKeys = 4 * kRows_, kColumns = kColumns_, kTokens = kTokens_;
  static constexpr int kThreads = kThreads_;

  alignas(16) float q[kTokens][kKeys];
  float k[kTokens][kKeys];
  float decay[kTokens][kChannels ? kKeys : 4];  // without kChannels, only element 0
  float v[kTokens][kColumns], beta[kTokens][kColumns];

  // Load tokens from `first` on. A thread issues all loads before it waits for the first: a group of tokens
  // costs one latency.
  template <typename T, typename Gate>
  __device__ __forceinline__ void load(const DeltaRuleInputs& in, const DeltaWork& work, int64_t first,
                                       const Gate& gate) {
    const int64_t batch = work.tokens.batch, from = work.slice * kColumns, left = work.tokens.end - first;
    const GmemRows<T> q_rows{in.q, in.q_strides.at(batch, first, work.key_head), in.q_strides.token, in.key_dim, left};
    const GmemRows<T> k_rows{in.k, in.k_strides.at(batch, first, work.key_head), in.k_strides.token, in.key_dim, left};
    const GmemRows<T> v_rows{in.v, in.v_strides.at(batch, first, work.value_head) + from, in.v_strides.token,
                             in.value_dim - from, left};
    const int64_t number = work.token_index(in, first);
    constexpr int kBetas = (kTokens * kColumns + kThreads - 1) / kThreads;
    const auto has_beta = [&](int i) { return i / kColumns < left && from + i % kColumns < in.value_dim; };
    float betas[kBetas];
    load_elements<kBetas>(betas, threadIdx.x, [&](int i) {
      const int64_t one = number + i / kColumns * in.num_value_heads;
      const int64_t at = in.beta_is_vector ? one * in.value_dim + from + i % kColumns : one;
      return has_beta(i) && in.beta ? load_float<float>(in.beta, at) : 1.f;
    });
    const auto gate_of = [&](int t) {
      return t < kTokens && t < left && in.g ? gate.gate(load_float<float>(in.g, number + t * in.num_value_heads))
                                             : 0.f;
    };
    const float common_gate = kChannels ? 0.f : gate_of(threadIdx.x);
    if (q_rows.is_aligned() && k_rows.is_aligned() && v_rows.is_aligned()) {
      ThreadVectors<T, kKeys> q_vectors(q_rows), k_vectors(k_rows);
      ThreadVectors<T, kColumns> v_vectors(v_rows);
      q_vectors.store(q), k_vectors.store(k), v_vectors.store(v);
    } else {
      q_rows.copy(q), k_rows.copy(k), v_rows.copy(v);
    }
#pragma unroll
    for (int n = 0; n < kBetas; ++n) {
      const int i = threadIdx.x + n * kThreads;
      if (i < kTokens * kColumns)
        beta[i / kColumns][i % kColumns] = !has_beta(i) ? 0.f : in.beta ? gate.beta(betas[n]) : 1.f;
    }
    if constexpr (kChannels) {
      const GmemRows<float> gate_rows{in.gk, number * in.key_dim, in.num_value_heads * in.key_dim, in.key_dim, left};
      gate_rows.copy(decay, [&](float g, int t, int d) { return __expf(gate.channel_gate(g, d) + gate_of(t)); });
    } else if (threadIdx.x < kTokens) {
      decay[threadIdx.x][0] = __expf(common_gate);
    }
    if (in.l2norm) normalise();
    __syncthreads();
  }

  // Compute q . k of each token. All threads call it.
  __device__ __forceinline__ void dot_q_k(float (&to)[kTokens]) const {
#pragma unroll
    for (int n = 0; n < (kTokens * 32 + kThreads - 1) / kThreads; ++n) {
      const int t = threadIdx.x / 32 + n * (kThreads / 32);
      if (t >= kTokens) break;
      float total = 0;
#pragma unroll
      for (int d = threadIdx.x % 32; d < kKeys; d += 32) total = fmaf(q[t][d], k[t][d], total);
      total = lanes_sum<32>(total);
      if (threadIdx.x % 32 == 0) to[t] = total;
    }
    __syncthreads();
  }

  // Normalise q and k. All threads call it.
  __device__ __forceinline__ void normalise() {
    __syncthreads();
    for (int row = threadIdx.x / 32; row < 2 * kTokens; row += kThreads / 32) {
      float* x = row < kTokens ? q[row] : k[row - kTokens];
      float total = 0;
      for (int d = threadIdx.x % 32; d < kKeys; d += 32) total += x[d] * x[d];
      const float factor = rsqrtf(lanes_sum<32>(total) + 1e-6f);
      for (int d = threadIdx.x % 32; d < kKeys; d += 32) x[d] *= factor;
    }
  }

 private:
  // Load elements first, first + kThreads and so on.
  template <int kCount, typename Load>
  static __device__ __forceinline__ void load_elements(float (&each)[kCount], int first, const Load& load) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) each[n] = load(first + n * kThreads);
  }

  // q, k, v or gates of `left` tokens of a head in gmem, `size` elements each.
  template <typename T>
  struct GmemRows {
    const T* from;
    int64_t stride, size, left;

    __device__ __forceinline__ GmemRows(const void* rows, int64_t start, int64_t stride_, int64_t size_, int64_t left_)
        : from(static_cast<const T*>(rows) + start), stride(stride_), size(size_), left(left_) {}

    // Return true if all rows consist of aligned vectors of 16 bytes.
    __device__ __forceinline__ bool is_aligned() const {
      return (reinterpret_cast<uintptr_t>(from) | ((stride | size) * sizeof(T))) % 16 == 0;
    }
    __device__ __forceinline__ bool has(int t, int d) const { return t < kTokens && t < left && d < size; }

    // Copy change(x, t, d) of each element x to smem, as floats.
    template <int kSize, typename Change>
    __device__ __forceinline__ void copy(float (&to)[kTokens][kSize], const Change& change) const {
      constexpr int kAll = kTokens * kSize, kCount = kAll < 8 * kThreads ? (kAll + kThreads - 1) / kThreads : 8;
#pragma unroll 1
      for (int start = threadIdx.x; start < kAll; start += kCount * kThreads) {
        float each[kCount];
        load_elements<kCount>(each, start, [&](int i) {
          return has(i / kSize, i % kSize) ? to_float(from[i / kSize * stride + i % kSize]) : 0.f;
        });
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
          const int i = start + n * kThreads, t = i / kSize;
          if (t < kTokens) to[t][i % kSize] = change(each[n], t, i % kSize);
        }
      }
    }
    template <int kSize>
    __device__ __forceinline__ void copy(float (&to)[kTokens][kSize]) const {
      copy(to, [](float x, int, int) { return x; });
    }
  };

  // 16-byte vectors of a thread. The constructor issues their loads, store() waits for them.
  template <typename T, int kSize>
  struct ThreadVectors {
    static constexpr int kVector = 16 / sizeof(T), kPerToken = kSize / kVector;
    static constexpr int kCount = (kTokens * kPerToken + kThreads - 1) / kThreads;
    static_assert(kSize % kVector == 0, "rows in shared memory are whole vectors");
    Vec<T, kVector> each[kCount];

    static __device__ __forceinline__ int token(int n) { return (threadIdx.x + n * kThreads) / kPerToken; }
    static __device__ __forceinline__ int element(int n) { return (threadIdx.x + n * kThreads) % kPerToken * kVector; }

    __device__ __forceinline__ explicit ThreadVectors(const GmemRows<T>& rows) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        each[n] = {};
        if (rows.has(token(n), element(n)))
          each[n] = load_vec<T, kVector>(rows.from + token(n) * rows.stride + element(n));
      }
    }
    __device__ __forceinline__ void store(float (&to)[kTokens][kSize]) const {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        float floats[kVector];
        each[n].to_floats(floats);
#pragma unroll
        for (int i = 0; i < kVector && token(n) < kTokens; i += 4)
          *reinterpret_cast<float4*>(&to[token(n)][element(n) + i]) =
              make_float4(floats[i], floats[i + 1], floats[i + 2], floats[i + 3]);
      }
    }
  };
};

// A range of columns of a head's state in a tensor of states. It is passed by value, so that the callee has
// it in registers.
struct DeltaStateView {
  int64_t start;
  int row_stride, column_stride;  // in elements of a state, which has fewer than 2^31
  int rows, columns;
  bool v_first;

  // `head` indexes the value heads of all states.
  __device__ __forceinline__ DeltaStateView(const DeltaRuleInputs& in, int64_t head, int64_t first)
      : start(head * in.state_size() + first * in.column_stride()),
        row_stride(static_cast<int>(in.row_stride())),
        column_stride(static_cast<int>(in.column_stride())),
        rows(static_cast<int>(in.key_dim)),
        columns(static_cast<int>(in.value_dim - first)),
        v_first(in.v_first) {}
};

// Columns of a state in smem, between gmem and registers. Threads access gmem along its contiguous dimension.
template <int kKeys, int kColumns, int kThreads_>
struct DeltaColumns {
  static constexpr int kThreads = kThreads_;

  float at[kKeys][kColumns + 1];

  // All threads call load() and store(). Elements beyond the state are zeros, and so is a null state.
  __device__ __noinline__ void load(const void* states, DType dtype, DeltaStateView view) {
    for_elements(view, [&](int d, int c, int64_t i, bool inside) {
      at[d][c] = !inside || !states         ? 0.f
                 : dtype == DType::kFloat32 ? load_float<float>(states, i)
                 : dtype == DType::kFloat16 ? load_float<half_t>(states, i)
                                            : load_float<bfloat16_t>(states, i);
    });
    __syncthreads();
  }
  __device__ __noinline__ void store(void* states, DType dtype, DeltaStateView view) const {
    __syncthreads();
    for_elements(view, [&](int d, int c, int64_t i, bool inside) {
      if (!inside) return;
      if (dtype == DType::kFloat32) {
        static_cast<float*>(states)[i] = at[d][c];
      } else if (dtype == DType::kFloat16) {
        static_cast<half_t*>(states)[i] = from_float<half_t>(at[d][c]);
      } else {
        static_cast<bfloat16_t*>(states)[i] = from_float<bfloat16_t>(at[d][c]);
      }
    });
  }

 private:
  template <typename Body>
  static __device__ __forceinline__ void for_elements(const DeltaStateView& view, const Body& body) {
#pragma unroll 8
    for (int e = threadIdx.x; e < kKeys * kColumns; e += kThreads) {
      const int d = view.v_first ? e % kKeys : e / kColumns, c = view.v_first ? e / kKeys : e % kColumns;
      const bool inside = d < view.rows && c < view.columns;
      body(d, c, view.start + d * view.row_stride + c * view.column_stride, inside);
    }
  }
};

// Rows of a column of a state, in the registers of a thread.
template <int kRows>
struct DeltaState {
  float at[kRows];

  static __device__ __forceinline__ int part() { return threadIdx.x % 4; }
  static __device__ __forceinline__ int column() { return threadIdx.x / 4; }
  // Return the row of the state that element i holds.
  static __device__ __forceinline__ int row(int i) { return i / 4 * 16 + part() * 4 + i % 4; }

  // Load this thread's elements of a row in smem.
  static __device__ __forceinline__ void load_row(const float* from, float (&to)[kRows]) {
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + row(i));
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& one : at) one = 0;
  }

  template <bool kChannels>
  __device__ __forceinline__ void decay(const float* factors) {
    if constexpr (kChannels) {
      float each[kRows];
      load_row(factors, each);
#pragma unroll
      for (int i = 0; i < kRows; ++i) at[i] *= each[i];
    } else {
      const float factor = factors[0];
#pragma unroll
      for (int i = 0; i < kRows; ++i) at[i] *= factor;
    }
  }

  // at += row * factor
  __device__ __forceinline__ void add(const float (&row)[kRows], float factor) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) at[i] = fmaf(row[i], factor, at[i]);
  }

  // Return the dot product of the column with a row, in all four threads.
  __device__ __forceinline__ float dot(const float (&row)[kRows]) const {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) sums[i % 4] = fmaf(at[i], row[i], sums[i % 4]);
    return lanes_sum<4>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
};

// Call body(kRows, kChannels). kRows is a quarter of the key dimension, rounded up to 64, 128 or 256.
// kChannels tells that each channel has its own decay.
template <typename Body>
void with_delta_shape(const DeltaRuleInputs& in, const Body& body) {
  const auto with_gate = [&](auto rows) { in.gk ? body(rows, std::true_type{}) : body(rows, std::false_type{}); };
  if (in.key_dim <= 64) return with_gate(std::integral_constant<int, 16>{});
  if (in.key_dim <= 128) return with_gate(std::integral_constant<int, 32>{});
  with_gate(std::integral_constant<int, 64>{});
}

}  // namespace flashinfer::cuda
