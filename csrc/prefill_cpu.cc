// The prefill family's CPU kernels for the configurations of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/prefill.h>

#include "attention_config.h"

namespace flashinfer {

WorkLimits attention_limits(const AttentionConfig&, int64_t rows, int32_t tile_rows, int) {
  return cpu::prefill_limits(rows, tile_rows);
}

void attention(const Params& params, const AttentionConfig& config, const Launch&) {
  (void)config;  // not asked where every axis has one value
  DISPATCH_dtypes(
      config, DISPATCH_head_dims(
                  config, DISPATCH_variants(config, {
                    using Types = cpu::AttentionTypes<DTypeQ, DTypeKV, DTypeO, HEAD_DIM_QK, HEAD_DIM_VO, POS_ENCODING>;
                    cpu::prefill<Variant, Types>(params);
                  })))
}

}  // namespace flashinfer
