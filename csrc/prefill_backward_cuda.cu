// Portable CUDA kernels of attention's gradients, one part per element type and size of heads.
#include <flashinfer/cuda/attention/backward/kernels.h>
#include <flashinfer/cuda/attention/backward/launch.cuh>

#include <iterator>

#include "prefill_backward_config.h"

namespace flashinfer {

template <int kPart>
void prefill_backward_part(const PrefillBackwardParams& params, const Launch& where);

template <>
void prefill_backward_part<FLASHINFER_PART>(const PrefillBackwardParams& params, const Launch& where) {
  cuda::prefill_backward<T, HEAD_DIM_QK, HEAD_DIM_VO>(params, where);
}

#if FLASHINFER_PART == 0

// Return the part with this element type and the smallest sufficient head sizes.
static int part_of(DType dtype, int qk, int vo) {
  constexpr int kNumParts = static_cast<int>(std::size(kParts));
  int best = -1;
  for (int part = 0; part < kNumParts; ++part) {
    const auto [part_dtype, max_qk, max_vo] = kParts[part];
    const bool enough = part_dtype == dtype && qk <= max_qk && vo <= max_vo;
    if (enough && (best < 0 || max_qk < std::get<1>(kParts[best]))) best = part;
  }
  if (best < 0) throw_not_covered("dtype", to_string(dtype), kDtypeText);
  return best;
}

int64_t prefill_backward_plan(PrefillBackwardParams& params, const Launch& where) {
  int64_t bytes = -1;
  Registered<cuda::BackwardKernels>::any([&](const cuda::BackwardKernels& kernels) {
    if (kernels.dtype == params.dtype) bytes = kernels.plan(params, where);
    if (bytes >= 0) params.arch = kernels.arch;
    return bytes >= 0;
  });
  return bytes >= 0 ? bytes : cuda::prefill_backward_plan(params, where);
}

void prefill_backward_clear(void* gradient, int64_t bytes, const Launch& where) {
  cuda::check(cudaMemsetAsync(gradient, 0, bytes, static_cast<cudaStream_t>(where.stream)), "cudaMemsetAsync");
}

void prefill_backward(const PrefillBackwardParams& params, const Launch& where) {
  if (params.arch != 0 && Registered<cuda::BackwardKernels>::any([&](const cuda::BackwardKernels& kernels) {
        const bool chosen = kernels.arch == params.arch && kernels.dtype == params.dtype;
        if (chosen) kernels.run(params, where);
        return chosen;
      }))
    return;
  call_numbered<std::size(kParts)>(part_of(params.dtype, params.head_dim_qk, params.head_dim_vo),
                                   [&](auto part) { prefill_backward_part<part>(params, where); });
}

#endif

}  // namespace flashinfer
