// sm_90a kernels of the decode family for one configuration of this module.
#include <flashinfer/cuda/attention/sm90/decode.cuh>

#include "attention_config.h"

namespace flashinfer {

using Types = cuda::AttentionTypes<DTypeQ, DTypeKV, DTypeO, HEAD_DIM_QK, HEAD_DIM_VO, POS_ENCODING>;

template <>
WorkLimits attention_limits<FLASHINFER_PART>(const AttentionConfig&, int64_t, int32_t, int device) {
  return cuda::sm90::decode_limits<Variant, Types, Params>(device);
}

template <>
void attention<FLASHINFER_PART>(const Params& params, const Launch& where) {
  cuda::sm90::decode<Variant, Types>(params, where);
}

}  // namespace flashinfer
