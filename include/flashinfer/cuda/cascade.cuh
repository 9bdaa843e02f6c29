// Merges of attention states on CUDA. threadIdx.x covers a row of head_dim elements in words of kN,
// threadIdx.y counts rows. Equations: common/cascade.h.
#pragma once

#include <initializer_list>

#include <flashinfer/common/cascade.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kMergeThreads = 128;

// Return 2^x for x in [-126, 0] to 0.6 ulp; exp2f is accurate to 2 ulp.
__device__ __forceinline__ float exact_exp2(float x) {
  const float k = rintf(x), f = x - k;
  float sum = 1.5252734e-5f;  // powers of ln(2) over factorials
  sum = fmaf(sum, f, 1.5403530e-4f);
  sum = fmaf(sum, f, 1.3333558e-3f);
  sum = fmaf(sum, f, 9.6181291e-3f);
  sum = fmaf(sum, f, 5.5504109e-2f);
  sum = fmaf(sum, f, 2.4022651e-1f);
  sum = fmaf(sum, f, 6.9314718e-1f);
  sum = fmaf(sum, f, 1.0f);
  return sum * __int_as_float((static_cast<int>(k) + 127) << 23);
}

// Return 2^(s - top), or 0 for an empty state, even if all states are empty. The rounding error of the
// subtraction is added back: for a difference of 20 it would cost seven ulp of the weight.
__device__ __forceinline__ float weight_of(float s, float top) {
  if (s == -INFINITY) return 0.0f;
  if (s == top) return 1.0f;
  const float high = s - top;
  if (!(high > -126.0f)) return exp2f(high);  // negligible, or NaN
  const float weight = exact_exp2(high);
  const float back = high - s, low = (s - (high - back)) - (top + back);
  return fmaf(weight, 0.69314718f * low, weight);
}

// Return a weight's share of the total; an empty state has share 0, even if all states are empty.
__device__ __forceinline__ float share_of(float weight, float total) { return weight == 0.0f ? 0.0f : weight / total; }

__device__ __forceinline__ float merged_lse(float top, float total) {
  return total == 0.0f ? -INFINITY : top + log2f(total);
}

// Sum of any number of terms. With kExact, rounding errors accumulate separately (compensated summation):
// those of forty terms would show in a float.
template <bool kExact>
struct Sum {
  float sum = 0, lost = 0;

  __device__ __forceinline__ void add(float term) {
    const float next = sum + term;
    if constexpr (kExact) {
      const float added = next - sum;
      lost += (sum - (next - added)) + (term - added);
    }
    sum = next;
  }

  __device__ __forceinline__ float get() const {
    return kExact && lost == lost ? sum + lost : sum;
  }  // NaN next to infinity
};

template <typename T>
using SumOf = Sum<sizeof(T) == sizeof(float)>;

// Add v * share. A share of 0 skips the element, which may be NaN.
template <typename T, int kN>
__device__ __forceinline__ void add(SumOf<T> (&sums)[kN], const Vec<T, kN>& v, float share) {
  if (share == 0.0f) return;
  float values[kN];
  v.to_floats(values);
#pragma unroll
  for (int i = 0; i < kN; ++i) sums[i].add(values[i] * share);
}

template <typename T, int kN>
__device__ __forceinline__ void store_sums(T* to, const SumOf<T> (&sums)[kN]) {
  float values[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) values[i] = sums[i].get();
  store_vec(to, Vec<T, kN>::from_floats(values));
}

template <typename T, int kN>
__global__ void __launch_bounds__(kMergeThreads) merge_state_kernel(const MergeStateParams p) {
  constexpr int kVecs = 2;  // of each of the two states in flight
  using V = Vec<T, kN>;
  const uint32_t row = blockIdx.x * blockDim.y + threadIdx.y, heads = p.num_heads;
  const uint32_t seq = row / heads, head = row % heads;
  const int num_vecs = p.head_dim / kN;

  wait_for_inputs();
  const bool active = row < p.seq_len * p.num_heads && (!p.mask || p.mask[seq]);
  const T *a = nullptr, *b = nullptr;
  T* out = nullptr;
  float s_a = 0, s_b = 0;
  if (active) {
    a = p.a.row<const T>(seq, head), b = p.b.row<const T>(seq, head), out = p.out.row<T>(seq, head);
    s_a = *p.a.lse(seq, head), s_b = *p.b.lse(seq, head);
  }
  __syncthreads();  // in place: one thread overwrites what all threads of the row have read
  if (active) {
    const float top = fmaxf(s_a, s_b), a_weight = weight_of(s_a, top), b_weight = weight_of(s_b, top);
    const float total = a_weight + b_weight;
    if (threadIdx.x == 0) *p.out.lse(seq, head) = merged_lse(top, total);
    const float a_share = share_of(a_weight, total), b_share = share_of(b_weight, total);
    for (int start = threadIdx.x; start < num_vecs; start += kVecs * blockDim.x) {
      V from_a[kVecs], from_b[kVecs];
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const int vec = start + i * blockDim.x;
        if (vec < num_vecs) from_a[i] = load_vec<T, kN>(a + vec * kN), from_b[i] = load_vec<T, kN>(b + vec * kN);
      }
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const int vec = start + i * blockDim.x;
        if (vec >= num_vecs) continue;
        SumOf<T> sums[kN];
        add(sums, from_a[i], a_share);
        add(sums, from_b[i], b_share);
        store_sums(out + vec * kN, sums);
      }
    }
  }
  launch_dependents();
}

template <typename T, int kN>
__global__ void __launch_bounds__(kMergeThreads) merge_states_kernel(const MergeStatesParams p) {
  constexpr int kStates = 4;  // loads of each thread in flight
  using V = Vec<T, kN>;
  const uint32_t row = blockIdx.x * blockDim.y + threadIdx.y, heads = p.num_heads;
  const uint32_t seq = row / heads, head = row % heads;
  const int num_vecs = p.head_dim / kN;

  wait_for_inputs();
  if (row < p.seq_len * p.num_heads) {
    const float* s = p.in.lse(seq, head);
    const T* v = p.in.row<const T>(seq, head);
    float top = -INFINITY;
#pragma unroll 4
    for (int64_t i = 0; i < p.num_states; ++i) top = fmaxf(top, s[i * p.s_state]);
    Sum<true> weights;
#pragma unroll 4
    for (int64_t i = 0; i < p.num_states; ++i) weights.add(weight_of(s[i * p.s_state], top));
    const float total = weights.get();
    if (threadIdx.x == 0) *p.out.lse(seq, head) = merged_lse(top, total);
    for (int vec = threadIdx.x; vec < num_vecs; vec += blockDim.x) {
      SumOf<T> sums[kN];
      for (int64_t start = 0; start < p.num_states; start += kStates) {
        V in[kStates];
        float lse[kStates];
#pragma unroll
        for (int i = 0; i < kStates; ++i) {
          lse[i] = -INFINITY;
          if (start + i < p.num_states) {
            in[i] = load_vec<T, kN>(v + (start + i) * p.v_state + vec * kN);
            lse[i] = s[(start + i) * p.s_state];
          }
        }
#pragma unroll
        for (int i = 0; i < kStates; ++i) {
          add(sums, in[i], share_of(weight_of(lse[i], top), total));
        }
      }
      store_sums(p.out.row<T>(seq, head) + vec * kN, sums);
    }
  }
  launch_dependents();
}

// Return the block size: threads per row, a power of two with about `vecs` vectors each, and rows.
inline dim3 merge_block(int64_t num_vecs, int vecs) {
  unsigned threads = 1;
  while (threads < kMergeThreads && threads * vecs < num_vecs) threads *= 2;
  return dim3(threads, kMergeThreads / threads);
}

template <int kN, int kVecs, typename Params>
void launch_merge(void (*kernel)(Params), const Params& p, const Launch& where) {
  const dim3 block = merge_block(p.head_dim / kN, kVecs);
  launch(kernel, dim3((p.seq_len * p.num_heads + block.y - 1) / block.y), block, where, p);
}

template <typename T>
void merge_state(const MergeStateParams& p, const Launch& where) {
  constexpr int kN = kVecBytes / sizeof(T);
  const bool aligned = fits_vectors<T>({p.a.v, p.b.v, p.out.v}, p.head_dim, p.a.v_seq, p.a.v_head, p.b.v_seq,
                                       p.b.v_head, p.out.v_seq, p.out.v_head);
  aligned ? launch_merge<kN, 2>(merge_state_kernel<T, kN>, p, where)
          : launch_merge<1, 2>(merge_state_kernel<T, 1>, p, where);
}

template <typename T>
void merge_states(const MergeStatesParams& p, const Launch& where) {
  constexpr int kN = kVecBytes / sizeof(T);
  const bool aligned =
      fits_vectors<T>({p.in.v, p.out.v}, p.head_dim, p.in.v_seq, p.in.v_head, p.v_state, p.out.v_seq, p.out.v_head);
  aligned ? launch_merge<kN, 1>(merge_states_kernel<T, kN>, p, where)
          : launch_merge<1, 1>(merge_states_kernel<T, 1>, p, where);
}

}  // namespace flashinfer::cuda
