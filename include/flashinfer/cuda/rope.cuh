// Rotary embedding on CUDA; equations in common/rope.h. A CTA takes one token or a few. Its threads compute
// the cosines and sines once into shared memory while the first vectors of the heads are in flight.
// threadIdx.x covers a head, threadIdx.y the heads of all tokens of the CTA. A thread moves two vectors of
// kRowsPerThread heads at a time. The two hold the same kN pairs in either layout.
#pragma once

#include <initializer_list>

#include <flashinfer/common/rope.h>
#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kRowsPerThread = 2;
constexpr int kRopeThreads = 256;
constexpr int kMaxTokensPerBlock = 8;

struct CosSin {
  float cos, sin;
};

// Return cosine and sine of a token and pair. The angle is reduced in double to at most half a quarter turn,
// where both are accurate to 1 ulp. A position outside the cache means no rotation: the host cannot check
// positions on the device.
__device__ __forceinline__ CosSin cos_sin(const RopeParams& p, int64_t token, int pair) {
  const int64_t position = p.position(token);
  if (p.with_cache) {
    if (position < 0 || position >= p.cache_size) return {1.0f, 0.0f};
    const float* row = p.cos_sin_cache + position * p.cache_stride;
    return {row[pair], row[p.rotary_dim / 2 + pair]};
  }
  const double step = p.frequencies ? p.frequencies[pair] * 0.63661977236758134 : p.quarters[pair];  // 2 / pi
  const double quarters = static_cast<double>(position) * step, whole = rint(quarters);
  float s, c;
  sincospif(static_cast<float>(quarters - whole) * 0.5f, &s, &c);
  const int quarter = static_cast<int>(__double2ll_rn(whole)) & 3;
  const float cosine = quarter & 1 ? s : c, sine = quarter & 1 ? c : s;
  return {(quarter + 1) & 2 ? -cosine : cosine, quarter & 2 ? -sine : sine};
}

// Two vectors of a head: their offsets and contents.
template <typename T, int kN>
struct VecPair {
  T* out;
  Vec<T, kN> low, high;
  int token, step, high_at;  // high_at: distance between the two vectors in elements

  __device__ __forceinline__ void load(const RopeParams& p, int64_t first_token, int row, int heads, int step_,
                                       int rotated) {
    token = row / heads;
    const int head = row - token * heads;
    const bool is_q = head < p.q.heads;
    const RopeHeads& side = is_q ? p.q : p.k;
    const int64_t at = first_token + token, in_side = is_q ? head : head - p.q.heads;
    step = step_;
    const bool rotates = step < rotated;
    const int start = rotates && !p.interleave ? step * kN : 2 * step * kN;  // copied after rotated
    high_at = rotates && !p.interleave ? static_cast<int>(p.rotary_dim / 2) : kN;
    const T* in =
        static_cast<const T*>(side.input) + at * side.input_token_stride + in_side * side.input_head_stride + start;
    out = static_cast<T*>(side.output) + at * side.output_token_stride + in_side * side.output_head_stride + start;
    low = load_vec<T, kN>(in);
    if (start + high_at < p.head_dim) {
      high = load_vec<T, kN>(in + high_at);
    } else {
      high_at = 0;  // an odd vector at the end of the copied ones
    }
  }

  __device__ __forceinline__ void rotate(bool interleave, const float* angles, int pairs) {
    const float* cos = angles + 2 * token * pairs + step * kN;
    float x[2 * kN], c[kN], s[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) x[i] = to_float(low.at[i]), x[kN + i] = to_float(high.at[i]);
    constexpr int kAtOnce = kN < 4 ? kN : 4;
#pragma unroll
    for (int i = 0; i < kN; i += kAtOnce) {
      const auto some_c = load_vec<float, kAtOnce>(cos + i), some_s = load_vec<float, kAtOnce>(cos + pairs + i);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) c[i + j] = some_c.at[j], s[i + j] = some_s.at[j];
    }
    if (interleave) {
#pragma unroll
      for (int i = 0; i < kN; ++i) rotate_pair(x[2 * i], x[2 * i + 1], c[i], s[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kN; ++i) rotate_pair(x[i], x[kN + i], c[i], s[i]);
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) low.at[i] = from_float<T>(x[i]), high.at[i] = from_float<T>(x[kN + i]);
  }

  __device__ __forceinline__ void store() const {
    store_vec(out, low);
    if (high_at != 0) store_vec(out + high_at, high);
  }

 private:
  static __device__ __forceinline__ void rotate_pair(float& a, float& b, float c, float s) {
    const float turned = a * c - b * s;
    b = b * c + a * s;
    a = turned;
  }
};

template <typename T, int kN>
__global__ void __launch_bounds__(kRopeThreads)
    rope_kernel(const __grid_constant__ RopeParams p, int tokens_per_block, int steps) {
  extern __shared__ __align__(kVecBytes) float angles[];  // cosines, then sines, of every token
  const int pairs = p.rotary_dim / 2, rotated = pairs / kN;
  const int64_t first = int64_t{blockIdx.x} * tokens_per_block;
  const int tokens = p.num_tokens - first < tokens_per_block ? p.num_tokens - first : tokens_per_block;
  const int heads = p.q.heads + p.k.heads, rows = tokens * heads;
  const int tile = blockDim.y * kRowsPerThread;
  bool angles_are_there = false;

  wait_for_inputs();
  for (int row0 = blockIdx.y * tile; row0 < rows; row0 += gridDim.y * tile) {
    for (int step0 = 0; step0 < steps; step0 += blockDim.x) {
      const int step = step0 + threadIdx.x;
      VecPair<T, kN> x[kRowsPerThread];
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
        const int row = row0 + threadIdx.y + i * blockDim.y;
        if (row < rows && step < steps) x[i].load(p, first, row, heads, step, rotated);
      }
      if (!angles_are_there) {
        for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < tokens * pairs; i += blockDim.x * blockDim.y) {
          const int token = i / pairs, pair = i - token * pairs;
          const CosSin both = cos_sin(p, first + token, pair);
          angles[2 * token * pairs + pair] = both.cos;
          angles[(2 * token + 1) * pairs + pair] = p.inverse ? -both.sin : both.sin;
        }
        __syncthreads();
        angles_are_there = true;
      }
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
        const int row = row0 + threadIdx.y + i * blockDim.y;
        if (row >= rows || step >= steps) continue;
        if (step < rotated) x[i].rotate(p.interleave, angles, pairs);
        x[i].store();
      }
    }
  }
  launch_dependents();
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename T, int kN>
void launch_rope(const RopeParams& p, const Launch& where) {
  const int64_t heads = p.q.heads + p.k.heads;
  const int64_t steps = p.rotary_dim / 2 / kN + (p.in_place ? 0 : ceil_div(p.head_dim - p.rotary_dim, 2 * kN));
  if (p.num_tokens == 0 || heads == 0 || steps == 0) return;
  // Take as many tokens as give every thread its heads, if enough CTAs remain for all SMs.
  const int64_t along = steps < 64 ? steps : 64, most_rows = kRopeThreads / along;
  const int64_t enough_blocks = 4 * device_info(where.device).num_sms;
  int64_t tokens = most_rows * kRowsPerThread / heads;
  tokens = tokens < 1 ? 1 : tokens > kMaxTokensPerBlock ? kMaxTokensPerBlock : tokens;
  while (tokens > 1 && ceil_div(p.num_tokens, tokens) < enough_blocks) --tokens;
  // Split the heads equally: one CTA takes all parts, or one part each if CTAs are few.
  const int64_t parts = ceil_div(tokens * heads, most_rows * kRowsPerThread);
  const int64_t rows = ceil_div(ceil_div(tokens * heads, parts), kRowsPerThread);
  const int64_t blocks = ceil_div(p.num_tokens, tokens);
  const dim3 grid(blocks, blocks < enough_blocks && parts <= 65535 ? parts : 1), block(along, rows);
  const int64_t smem = tokens * p.rotary_dim * static_cast<int64_t>(sizeof(float));
  Kernel<rope_kernel<T, kN>>::launch(grid, block, smem, where, p, tokens, steps);
}

template <typename T>
void rope(const RopeParams& p, const Launch& where) {
  constexpr int kN = kVecBytes / sizeof(T);
  const bool aligned =
      fits_vectors<T>({p.q.input, p.q.output, p.k.input, p.k.output}, p.rotary_dim / 2, p.in_place ? 0 : p.head_dim,
                      p.q.input_token_stride, p.q.input_head_stride, p.q.output_token_stride, p.q.output_head_stride,
                      p.k.input_token_stride, p.k.input_head_stride, p.k.output_token_stride, p.k.output_head_stride);
  aligned ? launch_rope<T, kN>(p, where) : launch_rope<T, 1>(p, where);
}

}  // namespace flashinfer::cuda
