// Fragments of the tensor cores' operands, from shared memory and from registers.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/attention/shape.cuh>
#include <flashinfer/cuda/attention/sm80/load.cuh>
#include <flashinfer/cuda/ptx/ldmatrix.cuh>
#include <flashinfer/cuda/ptx/mma.cuh>

namespace flashinfer::cuda {

template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (__is_same(T, bfloat16_t)) {
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  } else {
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
}

// Two floats as a register of two T, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t result;
  if constexpr (__is_same(T, bfloat16_t)) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&result, &pair, 4);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&result, &pair, 4);
  }
  return result;
}

template <typename T>
__device__ __forceinline__ void unpack(uint32_t pair, float& low, float& high) {
  T both[2];
  memcpy(both, &pair, 4);
  low = to_float(both[0]), high = to_float(both[1]);
}

// 16 rows of queries by 16 elements; `rows` is what query_rows() gave for the first of them.
template <typename S>
__device__ __forceinline__ uint32_t query_rows(uint32_t start, int first_row) {
  const int lane = threadIdx.x % 32;
  return Swizzle<S::kQRow>::chunk(Swizzle<S::kQRow>::row(start, first_row + lane % 16), lane / 16);
}
template <typename S>
__device__ __forceinline__ void query_fragment(uint32_t (&a)[4], uint32_t rows, int m, int step) {
  ptx::ldmatrix_x4(a, Swizzle<S::kQRow>::chunk(rows, 2 * step) + m * 16 * S::kQRow);
}

// Fragments of 16 keys by 16 elements: b[i] is of keys 8 i ... 8 i + 7. A lane has the elements
// key_element() + {0, 1, 2, 3} of 8-bit keys and + {0, 1, 8, 9} of 16-bit ones, of key lane / 4.
template <typename S>
__device__ __forceinline__ uint32_t key_rows(uint32_t start) {
  const int lane = threadIdx.x % 32;
  if constexpr (S::kFp8) return Swizzle<S::kKRow>::row(start, lane % 16);
  return Swizzle<S::kKRow>::chunk(Swizzle<S::kKRow>::row(start, lane % 8 + lane / 16 * 8), lane / 8 % 2);
}
template <typename S>
__device__ __forceinline__ void key_fragments(uint32_t (&b)[2][2], uint32_t rows, int pair, int step) {
  const uint32_t at = Swizzle<S::kKRow>::chunk(rows, S::kFp8 ? step : 2 * step) + pair * 16 * S::kKRow;
  if constexpr (S::kFp8) {
    uint32_t r[2];
    ptx::ldmatrix_x2(r, at);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      b[i][0] = widen<typename S::DTypeQ, typename S::KV>(r[i]);
      b[i][1] = widen<typename S::DTypeQ, typename S::KV>(r[i] >> 16);
    }
  } else {
    uint32_t r[4];
    ptx::ldmatrix_x4(r, at);
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
  }
}

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

// Fragments of 16 keys by 16 elements of the values: b[i] has columns of the output's fragment 2 * pair + i, see
// output_column().
template <typename S>
__device__ __forceinline__ uint32_t value_rows(uint32_t start) {
  const int lane = threadIdx.x % 32;
  const uint32_t row = Swizzle<S::kVRow>::row(start, lane % 16);
  return S::kFp8 ? row : Swizzle<S::kVRow>::chunk(row, lane / 16);
}
template <typename S>
__device__ __forceinline__ void value_fragments(uint32_t (&b)[2][2], uint32_t rows, int keys16, int pair) {
  const uint32_t at = Swizzle<S::kVRow>::chunk(rows, S::kFp8 ? pair : 2 * pair) + keys16 * 16 * S::kVRow;
  if constexpr (S::kFp8) {
    uint32_t r[2];
    ptx::ldmatrix_x2_trans(r, at);  // of two keys: element 2 c and 2 c + 1 of the one, then of the other
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      b[0][part] = widen<typename S::DTypeQ, typename S::KV>(__byte_perm(r[part], 0, 0x4420));
      b[1][part] = widen<typename S::DTypeQ, typename S::KV>(__byte_perm(r[part], 0, 0x4431));
    }
  } else {
    uint32_t r[4];
    ptx::ldmatrix_x4_trans(r, at);
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
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
