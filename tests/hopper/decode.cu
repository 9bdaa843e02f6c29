// Instances of the Hopper decode kernels, for test_decode_kernels.py to read what ptxas and the disassembler
// say.
#include <flashinfer/attention/variants.h>
#include <flashinfer/cuda/attention/sm90/decode.cuh>

namespace flashinfer {

struct Params : AttentionParams {
  float* maybe_alibi_slopes;
  double* maybe_numbers;
  float* maybe_head_scales;
  float* maybe_sinks;
  float sm_scale, logits_soft_cap;
};

template <typename T, typename KV, int kHeadDim, bool kSoftCap, bool kAlibi>
constexpr auto kInstance =
    cuda::sm90::decode<DefaultAttention<false, false, kSoftCap, kAlibi>,
                       cuda::AttentionTypes<T, KV, T, kHeadDim, kHeadDim, PosEncodingMode::kNone>, Params>;

// The shape that most requests have, the one with the most registers, and one of 8 bits.
void (*const instances[])(const Params&, const Launch&) = {
    kInstance<bfloat16_t, bfloat16_t, 128, false, false>,
    kInstance<half_t, half_t, 256, true, true>,
    kInstance<bfloat16_t, fp8_e4m3_t, 128, false, false>,
};

}  // namespace flashinfer
