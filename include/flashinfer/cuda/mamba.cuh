// Step of Mamba's state space model on CUDA. common/mamba.h has the equations. A CTA has some rows of a
// head's state in registers. It reads them once, applies all tokens, and writes them once.
#pragma once

#include <type_traits>

#include <flashinfer/common/mamba.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kStateThreads = 128;
constexpr int kStateFloats = 32;  // of a state per thread; fewer if a thread loads one element at a time

__device__ __forceinline__ float number_at(const StridedNumbers& numbers, int64_t at) {
  if (numbers.dtype == DType::kFloat32) return static_cast<const float*>(numbers.data)[at];
  if (numbers.dtype == DType::kFloat16) return to_float(static_cast<const half_t*>(numbers.data)[at]);
  return to_float(static_cast<const bfloat16_t*>(numbers.data)[at]);
}

// Load kN elements, in as many accesses as they need.
template <typename T, int kN>
__device__ __forceinline__ void load_floats(const T* from, float (&to)[kN]) {
  constexpr int kMaxPart = kVecBytes / static_cast<int>(sizeof(T)), kPart = kN < kMaxPart ? kN : kMaxPart;
#pragma unroll
  for (int i = 0; i < kN; i += kPart) {
    const Vec<T, kPart> vec = load_vec<T, kPart>(from + i);
#pragma unroll
    for (int j = 0; j < kPart; ++j) to[i + j] = to_float(vec.at[j]);
  }
}

// Load kN elements of a row of A that begins at `row`, from `column` on. With kN > 1 they are contiguous
// floats.
template <int kN>
__device__ __forceinline__ void numbers_at(const StridedNumbers& numbers, int64_t row, int column, float (&to)[kN]) {
  if constexpr (kN == 1) {
    to[0] = number_at(numbers, row + column * numbers.strides[2]);
  } else {
    load_floats<float, kN>(static_cast<const float*>(numbers.data) + row + column, to);
  }
}

// Round kN neighbours of a state at random. Random words come in fours, for elements from a multiple of 4 in
// the pool. Not inlined, because the random numbers take more registers than all the rest.
template <typename S, int kN>
__device__ __noinline__ Vec<S, kN> rounded_at_random(const StateUpdateParams& p, Vec<float, kN> values, int64_t element,
                                                     int64_t token) {
  Vec<S, kN> vec;
#pragma unroll
  for (int i = 0; i < kN; i += 4) {
    const PhiloxBlock words = rounding_words(static_cast<uint64_t>(*p.seed), (element + i) / 4, token, p.rounds);
#pragma unroll
    for (int j = 0; j < 4 && j < kN; ++j) {
      const int at = kN < 4 ? static_cast<int>(element % 4) : j;
      const uint32_t word =
          at < 2 ? (at == 0 ? words.words[0] : words.words[1]) : (at == 2 ? words.words[2] : words.words[3]);
      const float value = values.at[i + j];
      vec.at[i + j] =
          from_float<S>(__is_same(S, half_t) ? stochastic_half(value, word) : stochastic_bfloat16(value, word));
    }
  }
  return vec;
}

// Rows of a state of element type S. kLanes lanes share a row, with kChunks vectors each. A lane has kRows
// rows.
template <typename S, int kVec_, int kLanes_, int kChunks_>
struct StateRows {
  static constexpr int kVec = kVec_, kLanes = kLanes_, kChunks = kChunks_;
  static constexpr bool kScaled = std::is_same_v<S, int16_t>;
  static constexpr int kFit = kVec == 1 || kVec * kChunks >= kStateFloats ? 1 : kStateFloats / (kVec * kChunks);
  static constexpr int kRows = kFit < kLanes ? kFit : kLanes;
  static constexpr int kGroups = kStateThreads / kLanes, kTile = kRows * kGroups;
  static_assert(kRows <= kLanes, "each row's sum ends in a lane of its own");

  float at[kRows][kChunks][kVec];
  int64_t first_row;

  __device__ __forceinline__ int64_t row(int i) const { return first_row + i * kGroups + threadIdx.x / kLanes; }
  static __device__ __forceinline__ int column(int chunk) {
    return (chunk * kLanes + static_cast<int>(threadIdx.x) % kLanes) * kVec;
  }

  template <typename Body>
  __device__ __forceinline__ void each(const StateUpdateParams& p, const Body& body) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        if (row(i) < p.dim && column(chunk) < p.state_size) body(at[i][chunk], row(i) * p.state_size + column(chunk));
  }

  // Load the head's state from a slot. Padding, slot -1, starts from zeros.
  __device__ __forceinline__ void load(const StateUpdateParams& p, const S* from, int64_t slot, int64_t head) {
    const int64_t end = slot < 0 ? 0 : p.dim;
    Vec<S, kVec> raw[kRows][kChunks];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        if (row(i) < end && column(chunk) < p.state_size) {
          raw[i][chunk] = load_vec_once<S, kVec>(from + row(i) * p.state_size + column(chunk));
        } else {
          raw[i][chunk] = {};
        }
      }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (kScaled) {
        const float scale = row(i) < end ? *p.scales.at(slot, head, row(i)) : 0.f;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
          for (int j = 0; j < kVec; ++j) at[i][chunk][j] = static_cast<float>(raw[i][chunk].at[j]) * scale;
      } else {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) raw[i][chunk].to_floats(at[i][chunk]);
      }
    }
  }

  // Store rows of integers and their scales. Lanes after the end of a row have zeros.
  __device__ __forceinline__ void store_scaled(const StateUpdateParams& p, S* to, float* scales, int64_t stride) {
    float inverses[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float largest = 0.f;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
        for (int j = 0; j < kVec; ++j) largest = fmaxf(largest, magnitude_in_row(at[i][chunk][j]));
      const RowScale of(lanes_max<kLanes>(largest));
      inverses[i] = of.inverse;
      if (threadIdx.x % kLanes == 0 && row(i) < p.dim) scales[row(i) * stride] = of.scale;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        if (row(i) < p.dim && column(chunk) < p.state_size) {
          Vec<S, kVec> vec;
#pragma unroll
          for (int j = 0; j < kVec; ++j) vec.at[j] = static_cast<S>(__float2int_rn(at[i][chunk][j] * inverses[i]));
          store_vec_once(to + row(i) * p.state_size + column(chunk), vec);
        }
  }

  // `element` is the index of the head's first element in the pool, `token` that of the token in its
  // sequence. They select the random numbers.
  template <bool kRandom>
  __device__ __forceinline__ void store(const StateUpdateParams& p, S* to, int64_t element, int64_t token) {
    each(p, [&](float (&values)[kVec], int64_t offset) {
      Vec<S, kVec> vec;
      if constexpr (kRandom) {
        Vec<float, kVec> floats;
#pragma unroll
        for (int i = 0; i < kVec; ++i) floats.at[i] = values[i];
        vec = rounded_at_random<S, kVec>(p, floats, element + offset, token);
      } else {
        vec = Vec<S, kVec>::from_floats(values);
      }
      store_vec_once(to + offset, vec);
    });
  }
};

template <typename T, typename S, typename Rows, bool kOneDecay, bool kRandom = false>
__global__ void __launch_bounds__(kStateThreads) state_update_kernel(const StateUpdateParams p, int tiles) {
  constexpr int kRows = Rows::kRows, kChunks = Rows::kChunks, kVec = Rows::kVec, kLanes = Rows::kLanes;
  const int64_t block = blockIdx.x, head = block / tiles % p.num_heads, n = block / tiles / p.num_heads;
  const int64_t group = head / (p.num_heads / p.num_groups);
  wait_for_inputs();
  launch_dependents();
  const StateSequence tokens(p, n);
  Rows state;
  state.first_row = block % tiles * Rows::kTile;
  const auto out_at = [&](int64_t t) {
    return static_cast<T*>(const_cast<void*>(p.out.data)) + p.out.at(tokens.batch, t, head);
  };
  const int64_t in_slot = head * p.head_size(), element = tokens.slot * p.num_heads * p.head_size() + in_slot;
  state.load(p, static_cast<const S*>(p.state) + tokens.slot * p.slot_stride + in_slot, tokens.slot, head);
  const float a = kOneDecay ? number_at(p.a, head * p.a.strides[0]) : 0.f;

  const auto step_of = [&](int64_t t, int64_t row) {
    float dt = number_at(
        p.dt, tokens.batch * p.dt.strides[0] + t * p.dt.strides[1] + head * p.dt.strides[2] + row * p.dt.strides[3]);
    if (p.bias.data) dt += number_at(p.bias, head * p.bias.strides[0] + row * p.bias.strides[1]);
    return !p.softplus || dt > 20.f ? dt : log1pf(expf(dt));
  };

  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const T* x_row = static_cast<const T*>(p.x.data) + p.x.at(tokens.batch, t, head);
    const T* b_row = static_cast<const T*>(p.b.data) + p.b.at(tokens.batch, t, group);
    const T* c_row = static_cast<const T*>(p.c.data) + p.c.at(tokens.batch, t, group);
    const float head_step = kOneDecay ? step_of(t, 0) : 0.f, head_decay = kOneDecay ? expf(head_step * a) : 0.f;
    float x[kRows], step[kRows], sums[kRows] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool here = state.row(i) < p.dim;
      x[i] = here ? to_float(x_row[state.row(i)]) : 0.f;
      step[i] = kOneDecay ? head_step : here ? step_of(t, state.row(i)) : 0.f;
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int column = Rows::column(chunk);
      if (column >= p.state_size) continue;
      float b[kVec], c[kVec];
      load_floats<T, kVec>(b_row + column, b);
      load_floats<T, kVec>(c_row + column, c);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float input = step[i] * x[i];
        float decays[kVec];
        if constexpr (!kOneDecay) {
          const int64_t row = state.row(i) < p.dim ? state.row(i) : 0;
          numbers_at(p.a, head * p.a.strides[0] + row * p.a.strides[1], column, decays);
        }
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const float decay = kOneDecay ? head_decay : expf(step[i] * decays[j]);
          float& s = state.at[i][chunk][j];
          s = fmaf(b[j], input, s * decay);  // an explicit fma gives the same bits in every kernel
          sums[i] = fmaf(s, c[j], sums[i]);
        }
      }
    }
    scattered_lane_sums<kLanes, kRows>(sums);
    float y = sums[0];
    const int64_t row = state.row(static_cast<int>(threadIdx.x) % kLanes / (kLanes / kRows));
    if (threadIdx.x % (kLanes / kRows) == 0 && row < p.dim) {
      if (p.d.data) y += number_at(p.d, head * p.d.strides[0] + row * p.d.strides[1]) * to_float(x_row[row]);
      if (p.z.data) {
        const float z = to_float((static_cast<const T*>(p.z.data) + p.z.at(tokens.batch, t, head))[row]);
        y *= z / (1.f + expf(-z));
      }
      out_at(t)[row] = from_float<T>(y);
    }
    const int64_t to = tokens.slot_after(p, n, t), history = tokens.history_after(p, t, head);
    if (to >= 0) {
      S* const place = static_cast<S*>(p.state) + to * p.slot_stride + in_slot;
      if constexpr (Rows::kScaled)
        state.store_scaled(p, place, p.scales.at(to, head, 0), p.scales.row_stride);
      else
        state.template store<kRandom>(p, place, element, t - tokens.begin);
    }
    if (history >= 0) {
      S* const place = static_cast<S*>(p.history) + history * p.head_size();
      if constexpr (Rows::kScaled)
        state.store_scaled(p, place, p.history_scales.at(history, 0, 0), 1);
      else
        state.template store<kRandom>(p, place, element, t - tokens.begin);
    }
  }
}

template <typename T, typename S, typename Rows, bool kOneDecay, bool kRandom = false>
void launch_state_update(const StateUpdateParams& p, const Launch& where) {
  const int64_t tiles = (p.dim + Rows::kTile - 1) / Rows::kTile;
  const auto blocks = static_cast<unsigned>(tiles * p.num_heads * p.num_sequences);
  launch(state_update_kernel<T, S, Rows, kOneDecay, kRandom>, blocks, kStateThreads, where, p, static_cast<int>(tiles));
}

// Return true if vectors of `n` elements of T, or of 16 bytes if shorter, are aligned in B and C.
template <typename T>
bool has_token_vectors(const TokenTensor& tensor, int64_t n) {
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T)) < kVecBytes ? n * sizeof(T) : kVecBytes;
  const int64_t elements = bytes / static_cast<int64_t>(sizeof(T));
  return reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0 && tensor.batch_stride % elements == 0 &&
         tensor.token_stride % elements == 0 && tensor.head_stride % elements == 0;
}

// Return true if rows of A are floats that allow loads of 16 bytes.
inline bool has_decay_vectors(const StridedNumbers& a, int64_t state_size) {
  return a.dtype == DType::kFloat32 && (state_size == 1 || a.strides[2] == 1) && a.strides[0] % 4 == 0 &&
         a.strides[1] % 4 == 0 && reinterpret_cast<uintptr_t>(a.data) % 16 == 0;
}

template <typename T, typename S>
void selective_state_update(const StateUpdateParams& p, const Launch& where) {
  constexpr int kVec = kVecBytes / static_cast<int>(sizeof(S));
  const bool vectors = p.state_size % kVec == 0 && fits_vectors<S>({p.state, p.history}, p.slot_stride) &&
                       has_token_vectors<T>(p.b, kVec) && has_token_vectors<T>(p.c, kVec);
  const auto run = [&](auto rows, auto one_decay, auto random) {
    launch_state_update<T, S, decltype(rows), one_decay(), random()>(p, where);
  };
  constexpr std::true_type kYes;
  constexpr std::false_type kNo;
  using One = StateRows<S, 1, 32, kMaxStateSize / 32>;
  if constexpr (!std::is_same_v<S, float> && !std::is_same_v<S, int16_t>) {
    if (p.seed && vectors && p.one_decay() && p.state_size <= 16 * kVec)
      return run(StateRows<S, kVec, 16, 1>{}, kYes, kYes);
    if (p.seed) return run(One{}, kNo, kYes);
  }
  if (vectors && p.one_decay()) {
    if (p.state_size <= 16 * kVec) return run(StateRows<S, kVec, 16, 1>{}, kYes, kNo);
    if (p.state_size <= 32 * kVec) return run(StateRows<S, kVec, 32, 1>{}, kYes, kNo);
    return run(StateRows<S, kVec, 32, 2>{}, kYes, kNo);
  }
  if (vectors && has_decay_vectors(p.a, p.state_size)) {
    if (p.state_size <= 4 * kVec) return run(StateRows<S, kVec, 4, 1>{}, kNo, kNo);
    if (p.state_size <= 32 * kVec) return run(StateRows<S, kVec, 32, 1>{}, kNo, kNo);
  }
  run(One{}, kNo, kNo);
}

template <typename T>
void selective_state_update(const StateUpdateParams& p, const Launch& where) {
  if (p.state_dtype == DType::kFloat32) return selective_state_update<T, float>(p, where);
  if (p.state_dtype == DType::kFloat16) return selective_state_update<T, half_t>(p, where);
  if (p.state_dtype == DType::kInt16) return selective_state_update<T, int16_t>(p, where);
  selective_state_update<T, bfloat16_t>(p, where);
}

}  // namespace flashinfer::cuda
