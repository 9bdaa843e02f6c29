// Kernels of decode without a plan, for test_plan_free_kernels.py: the schedule, and tiles that mask drafts.
#include <flashinfer/attention/check_variant.h>
#include <flashinfer/attention/draft_mask.h>
#include <flashinfer/cuda/attention/batch_schedule.cuh>
#include <flashinfer/cuda/attention/sm80/prefill.cuh>

namespace flashinfer {

struct Params : AttentionParams {
  double* maybe_numbers;
  float* maybe_sinks;
  uint16_t* draft_mask;
  int32_t* maybe_draft_starts;
  float sm_scale;
  int64_t draft_words;
};

template <typename KV, int kHeadDim>
using Shapes =
    cuda::PrefillShapes<cuda::AttentionTypes<bfloat16_t, KV, bfloat16_t, kHeadDim, kHeadDim, PosEncodingMode::kNone>>;
using Variant = CheckedVariant<DraftMask, Params>;

void (*const instances[])(const Params&, const Launch&) = {
    cuda::launch_attention<Variant, Shapes<bfloat16_t, 128>::Small>,
    cuda::launch_attention<Variant, Shapes<bfloat16_t, 128>::Medium>,
    cuda::launch_attention<Variant, Shapes<fp8_e4m3_t, 128>::Small>,
    cuda::launch_attention<Variant, Shapes<fp8_e4m3_t, 128>::Medium>,
    cuda::launch_attention<Variant, Shapes<bfloat16_t, 256>::Medium>,
};

}  // namespace flashinfer
