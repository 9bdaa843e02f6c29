// Norms with a quantised result on the CPU, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/norm_quant.h>

#include "norm_quant_config.h"

namespace flashinfer {

void rms_norm_quant(const RmsNormQuantParams& params, const Launch&) {
  DISPATCH_dtype(
      params.dtype, T, switch (params.output_dtype) {
        case DType::kInt8: return cpu::rms_norm_quant<T, int8_t>(params);
        case DType::kFloat8E5M2: return cpu::rms_norm_quant<T, fp8_e5m2_t>(params);
        default: return cpu::rms_norm_quant<T, fp8_e4m3_t>(params);
      })
}

namespace {

template <typename T, typename Q>
void layer_norm_as(const LayerNormQuantParams& p) {
  p.affine_is_float32 ? cpu::layer_norm_quant<T, float, Q>(p) : cpu::layer_norm_quant<T, T, Q>(p);
}

}  // namespace

void layer_norm_quant(const LayerNormQuantParams& params, const Launch&) {
  DISPATCH_dtype(
      params.dtype, T, switch (params.output_dtype) {
        case DType::kInt8: return layer_norm_as<T, int8_t>(params);
        case DType::kFloat8E5M2: return layer_norm_as<T, fp8_e5m2_t>(params);
        default: return layer_norm_as<T, fp8_e4m3_t>(params);
      })
}

void rms_norm_block_quant(const RmsNormBlockQuantParams& params, const Launch&) {
  DISPATCH_dtype(params.dtype, T, cpu::rms_norm_block_quant<T>(params))
}

}  // namespace flashinfer
