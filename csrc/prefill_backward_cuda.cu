// The CUDA kernels of attention's gradients: a part of this file for each element type and size of heads.
#include <flashinfer/cuda/attention/backward/launch.cuh>

#include "prefill_backward_config.h"

namespace flashinfer {

template <int kPart>
void prefill_backward_part(const PrefillBackwardParams& params, const Launch& where);

template <>
void prefill_backward_part<FLASHINFER_PART>(const PrefillBackwardParams& params, const Launch& where) {
  WITH_PART(T, QK, VO, cuda::prefill_backward<T, QK, VO>(params, where);)
}

#if FLASHINFER_PART == 0

int64_t prefill_backward_plan(PrefillBackwardParams& params, const Launch& where) {
  return cuda::prefill_backward_plan(params, where);
}

void prefill_backward_clear(void* gradient, int64_t bytes, const Launch& where) {
  cuda::check(cudaMemsetAsync(gradient, 0, bytes, static_cast<cudaStream_t>(where.stream)), "cudaMemsetAsync");
}

void prefill_backward(const PrefillBackwardParams& params, const Launch& where) {
  const int32_t qk = params.head_dim_qk, vo = params.head_dim_vo;
  DISPATCH_parts(params.dtype, qk, vo, PART, prefill_backward_part<PART>(params, where);)
}

#endif

}  // namespace flashinfer
