// CPU kernels of the decode family for one configuration of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/attention/decode.h>

#include "attention_config.h"

namespace flashinfer {

using Types = cpu::AttentionTypes<DTypeQ, DTypeKV, DTypeO, HEAD_DIM_QK, HEAD_DIM_VO, POS_ENCODING>;

template <>
WorkLimits attention_limits<FLASHINFER_PART>(const AttentionConfig& config, int64_t rows, int32_t tile_rows, int) {
  return cpu::decode_limits(config, rows, tile_rows);
}

template <>
void attention<FLASHINFER_PART>(const Params& params, const Launch&) {
  cpu::decode<Variant, Types>(params);
}

}  // namespace flashinfer
