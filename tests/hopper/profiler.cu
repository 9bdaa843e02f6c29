// Kernels of an arch, for test_profiler.py; with EVENTS they write them.
#if ARCH == 80
#include <flashinfer/cuda/attention/sm80/decode.cuh>
#include <flashinfer/cuda/mla/sm80.cuh>
#else
#include <flashinfer/cuda/attention/sm90/prefill.cuh>
#include <flashinfer/cuda/mla/sm90.cuh>
#endif
#include <flashinfer/attention/variants.h>

namespace flashinfer {

#if defined(EVENTS)
template <typename Params>
using Of = Profiled<Params, true>;
#else
template <typename Params>
using Of = Params;
#endif

struct Params : Of<AttentionParams> {
  float* maybe_alibi_slopes;
  double* maybe_numbers;
  float* maybe_head_scales;
  float* maybe_sinks;
  float sm_scale, logits_soft_cap;
};
using Variant = DefaultAttention<false, false, false, false>;
template <typename T>
using Types = cuda::AttentionTypes<T, T, T, 128, 128, PosEncodingMode::kNone>;

#if ARCH == 80
template void cuda::sm80::mla<bfloat16_t, bfloat16_t>(const Of<MlaParams>&, const Launch&);
template void cuda::decode<Variant, Types<bfloat16_t>>(const Params&, const Launch&);
#else
template void cuda::sm90::mla<bfloat16_t>(const Of<MlaParams>&, const Launch&);
template void cuda::sm90::prefill<Variant, Types<bfloat16_t>>(const Params&, const Launch&);
#endif

}  // namespace flashinfer
