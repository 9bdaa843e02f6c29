// Instances of the Hopper prefill kernel, for test_prefill_kernels.py to read what ptxas and the disassembler
// say.
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

template <typename T, typename O, int kHeadDimQK, int kHeadDimVO, bool kSoftCap, bool kAlibi>
constexpr auto kInstance =
    cuda::sm90::prefill<DefaultAttention<false, false, kSoftCap, kAlibi>,
                        cuda::AttentionTypes<T, T, O, kHeadDimQK, kHeadDimVO, PosEncodingMode::kNone>, Params>;

// The shape that most requests have, the one with the most registers, and one of 8 bits.
void (*const instances[])(const Params&, const Launch&) = {
    kInstance<bfloat16_t, bfloat16_t, 128, 128, false, false>,
    kInstance<half_t, half_t, 256, 256, true, true>,
    kInstance<fp8_e4m3_t, bfloat16_t, 128, 128, false, false>,
};

// A derived LogitsTransform replaces the inherited PairTransform.
struct Doubled : FlashSigmoid {
  using FlashSigmoid::FlashSigmoid;
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, { return 2 * logits; })
};
static_assert(transforms_pairs<FlashSigmoid> && !transforms_pairs<Doubled> && !transforms_pairs<AttentionVariantBase>);

}  // namespace flashinfer
