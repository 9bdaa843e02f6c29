// Prefill on Hopper with a variant that has a LogitsMask, for test_masked_prefill.py: every tile that masks
// may meet.
#include <flashinfer/attention/variants.h>
#include <flashinfer/cuda/attention/sm90/prefill.cuh>

namespace flashinfer {

struct Params : AttentionParams {
  float* maybe_alibi_slopes;
  double* maybe_numbers;
  float* maybe_head_scales;
  float* maybe_sinks;
  float sm_scale, logits_soft_cap;
};

struct EveryOther : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  float sm_scale_log2;

  template <typename P>
  FLASHINFER_HD EveryOther(const P& params, uint32_t, uint8_t*) : sm_scale_log2(params.sm_scale * math::log2e) {}

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx,
                       { return kv_idx % 2 == qo_idx % 2; })
};

template <typename T, int kHeadDim>
constexpr auto kInstance =
    cuda::sm90::prefill<EveryOther, cuda::AttentionTypes<T, T, bfloat16_t, kHeadDim, kHeadDim, PosEncodingMode::kNone>,
                        Params>;

void (*const instances[])(const Params&, const Launch&) = {
    kInstance<fp8_e4m3_t, 64>,
    kInstance<fp8_e4m3_t, 128>,
    kInstance<bfloat16_t, 64>,
};

}  // namespace flashinfer
