// Operands of an attention kernel's products, from its tiles in shared memory, and what a lane has of the output.
#pragma once

#include <cstdint>
#include <type_traits>

#include <flashinfer/cuda/attention/shape.cuh>
#include <flashinfer/cuda/attention/sm80/load.cuh>
#include <flashinfer/cuda/tile/fragment.cuh>
#include <flashinfer/cuda/tile/fragment8.cuh>

namespace flashinfer::cuda {

template <typename S>
using KeyOperand =
    std::conditional_t<S::kFp8, RightRows8<typename S::DTypeQ, typename S::KV, S::kKRow>, RightRows<S::kKRow>>;

// The columns of the output's fragments are those of output_pair().
template <typename S>
using ValueOperand =
    std::conditional_t<S::kFp8, SummedRows8<typename S::DTypeQ, typename S::KV, S::kVRow>, SummedRows<S::kVRow>>;

// The number of an element of a lane's fragment, i = 0 ... 3.
template <typename S>
__device__ __forceinline__ int key_element(int step, int i) {
  const int lane = threadIdx.x % 4;
  return step * 16 + (S::kFp8 ? 4 * lane + i : 2 * lane + i / 2 * 8 + i % 2);
}

template <typename Variant, typename S, typename P>
__device__ __forceinline__ void transform_keys(uint32_t (&b)[2][2], const P& params, const Variant& variant) {
  using T = typename S::DTypeQ;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float x, y;
    unpack<T>(b[i / 2][i % 2], x, y);
    b[i / 2][i % 2] = pack<T>(variant.KeyTransform(params, x), variant.KeyTransform(params, y));
  }
}

// Fragments of keys in two parts whose sum they are: rounded to 16 bits, and what that took away.
struct KeyParts {
  uint32_t rounded[2][2], rest[2][2];

  template <typename T>
  __device__ __forceinline__ void set(int n, int part, const float (&x)[2]) {
    float back[2];
    rounded[n][part] = pack<T>(x[0], x[1]);
    unpack<T>(rounded[n][part], back[0], back[1]);
    rest[n][part] = pack<T>(x[0] - back[0], x[1] - back[1]);
  }
};

// Rotates fragments of one half of the head dimension, keys[0], with those of the other; `first_key` is the position of
// the first of 16 keys.
template <typename S>
__device__ __forceinline__ void rotate_keys(KeyParts (&keys)[2], const Turns* turns, int step, int32_t first_key) {
  using T = typename S::DTypeQ;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = i / 2, part = i % 2;
    const int32_t position = first_key + 8 * n + static_cast<int>(threadIdx.x % 32) / 4;
    float a[2], b[2];
    unpack<T>(keys[0].rounded[n][part], a[0], a[1]);
    unpack<T>(keys[1].rounded[n][part], b[0], b[1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) rotate(a[j], b[j], turns[key_element<S>(step, 2 * part + j)], position);
    keys[0].set<T>(n, part, a), keys[1].set<T>(n, part, b);
  }
}

// What a lane has of 16 columns of the output: two pairs of neighbours of a row, from two fragments of it (`half`: of
// row lane / 4 or of that plus 8). Returns the column of the first.
template <typename S>
__device__ __forceinline__ int output_pair(const float (&even)[4], const float (&odd)[4], int half, int pair, int which,
                                           float (&values)[2]) {
  const int lane = threadIdx.x % 4;
  if constexpr (S::kFp8) {  // the fragments have the even and the odd columns
    values[0] = even[2 * half + which], values[1] = odd[2 * half + which];
    return pair * 16 + 4 * lane + 2 * which;
  } else {
    const float (&from)[4] = which ? odd : even;
    values[0] = from[2 * half], values[1] = from[2 * half + 1];
    return pair * 16 + 8 * which + 2 * lane;
  }
}

}  // namespace flashinfer::cuda
