// Instances of the Hopper prefill kernel, for test_prefill_kernels.py to read what ptxas and the disassembler say.
#include <flashinfer/attention/variants.h>
#include <flashinfer/cuda/attention/sm90/prefill.cuh>

namespace flashinfer {

struct Params : AttentionParams {
  float* maybe_alibi_slopes;
  double* maybe_numbers;
  float* maybe_head_scales;
  float sm_scale, logits_soft_cap;
};

template <typename T, int kHeadDimQK, int kHeadDimVO, bool kSoftCap, bool kAlibi>
constexpr auto kInstance =
    cuda::sm90::prefill<DefaultAttention<false, false, kSoftCap, kAlibi>,
                        cuda::AttentionTypes<T, T, T, kHeadDimQK, kHeadDimVO, PosEncodingMode::kNone>, Params>;

// The shape that most requests have, and the one with the most registers.
void (*const instances[])(const Params&, const Launch&) = {
    kInstance<bfloat16_t, 128, 128, false, false>,
    kInstance<half_t, 256, 256, true, true>,
};

}  // namespace flashinfer
