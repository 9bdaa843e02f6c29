// CPU kernels of the prefill family for one configuration of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/attention/prefill.h>

#include "attention_config.h"

namespace flashinfer {

using Types = cpu::AttentionTypes<DTypeQ, DTypeKV, DTypeO, HEAD_DIM_QK, HEAD_DIM_VO, POS_ENCODING>;

template <>
WorkLimits attention_limits<FLASHINFER_PART>(const AttentionConfig&, int64_t rows, int32_t tile_rows, int) {
  return cpu::prefill_limits(rows, tile_rows);
}

template <>
void attention<FLASHINFER_PART>(const Params& params, const Launch&) {
  cpu::prefill<Variant, Types>(params);
}

}  // namespace flashinfer
