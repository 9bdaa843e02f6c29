// The prefill family's CUDA kernels for the configurations of this module.
#include <flashinfer/cuda/prefill.cuh>

#include "attention_config.h"

namespace flashinfer {

WorkLimits attention_limits(const AttentionConfig& config, int64_t rows, int32_t tile_rows, int device) {
  (void)config;  // not asked where every axis has one value
  DISPATCH_dtypes(
      config, DISPATCH_head_dims(
                  config, DISPATCH_variants(config, {
                    using Types = cuda::AttentionTypes<DTypeQ, DTypeKV, DTypeO, HEAD_DIM_QK, HEAD_DIM_VO, POS_ENCODING>;
                    return cuda::prefill_limits<Variant, Types, Params>(rows, tile_rows, device);
                  })))
}

void attention(const Params& params, const AttentionConfig& config, const Launch& where) {
  (void)config;
  DISPATCH_dtypes(
      config, DISPATCH_head_dims(
                  config, DISPATCH_variants(config, {
                    using Types = cuda::AttentionTypes<DTypeQ, DTypeKV, DTypeO, HEAD_DIM_QK, HEAD_DIM_VO, POS_ENCODING>;
                    cuda::prefill<Variant, Types>(params, where);
                  })))
}

}  // namespace flashinfer
