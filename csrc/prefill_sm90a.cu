// sm_90a kernels of the prefill family for one configuration of this module.
#include <flashinfer/cuda/attention/sm90/prefill.cuh>

#include "attention_config.h"

namespace flashinfer {

using Types = cuda::AttentionTypes<DTypeQ, DTypeKV, DTypeO, HEAD_DIM_QK, HEAD_DIM_VO, POS_ENCODING>;

template <>
WorkLimits attention_limits<FLASHINFER_PART>(const AttentionConfig& config, int64_t, int32_t tile_rows, int device) {
  return cuda::sm90::prefill_limits<Types>(config.group, tile_rows, device);
}

template <>
void attention<FLASHINFER_PART>(const Params& params, const Launch& where) {
  cuda::sm90::prefill<Variant, Types>(params, where);
}

}  // namespace flashinfer
