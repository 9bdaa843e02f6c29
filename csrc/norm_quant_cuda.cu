// Norms with a quantised result on CUDA, for the element types of this module.
#include <flashinfer/cuda/norm_quant.cuh>

#include "norm_quant_config.h"

namespace flashinfer {

void rms_norm_quant(const RmsNormQuantParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::rms_norm_quant<T>(params, where))
}

void layer_norm_quant(const LayerNormQuantParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::layer_norm_quant<T>(params, where))
}

void rms_norm_block_quant(const RmsNormBlockQuantParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::rms_norm_block_quant<T>(params, where))
}

}  // namespace flashinfer
