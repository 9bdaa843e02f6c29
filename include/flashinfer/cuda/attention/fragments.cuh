// Operands of attention's products, loaded from shared memory, and the output columns of each lane.
#pragma once

#include <cstdint>
#include <type_traits>

#include <flashinfer/cuda/attention/shape.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/fragment.cuh>
#include <flashinfer/cuda/tile/fragment8.cuh>

namespace flashinfer::cuda {

template <typename S>
using KeyOperand =
    std::conditional_t<S::kFp8Keys, SmemOperandB8<typename S::DTypeQ, typename S::KV, S::kOperandRowBytes>,
                       SmemOperandB<S::kOperandRowBytes>>;

// output_pair() maps columns of the product's fragments to columns of the output.
template <typename S>
using ValueOperand =
    std::conditional_t<S::kFp8, SmemOperandBTransposed8<typename S::DTypeQ, typename S::KV, S::kVRowBytes>,
                       SmemOperandBTransposed<S::kVRowBytes>>;

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

// Two fragments hold 16 columns of the output, and each lane has two pairs of adjacent ones. Copy pair number
// `part` to `values` and return its first column. `half` selects row lane / 4, or that row plus 8.
template <typename S>
__device__ __forceinline__ int output_pair(const float (&even)[4], const float (&odd)[4], int half, int pair, int part,
                                           float (&values)[2]) {
  const int lane = threadIdx.x % 4;
  if constexpr (S::kFp8) {  // one fragment has the even columns, the other the odd ones
    values[0] = even[2 * half + part], values[1] = odd[2 * half + part];
    return pair * 16 + 4 * lane + 2 * part;
  } else {
    const float (&from)[4] = part ? odd : even;
    values[0] = from[2 * half], values[1] = from[2 * half + 1];
    return pair * 16 + 8 * part + 2 * lane;
  }
}

}  // namespace flashinfer::cuda
