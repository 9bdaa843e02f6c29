// Sampling on CUDA. Kernels select the element type at run time, because rows are read once. The module's
// types are checked here.
#include <flashinfer/cuda/sampling.cuh>

#include "sampling_config.h"

namespace flashinfer {
namespace {

void require_covered(DType dtype) { DISPATCH_dtype(dtype, T, static_cast<void>(sizeof(T))) }

}  // namespace

int64_t longest_row(bool keeps_maxima, const Launch& where) { return cuda::longest_row(keeps_maxima, where.device); }

void sample_rows(const SampleParams& params, const Launch& where) {
  require_covered(params.input.dtype);
  cuda::sample_rows(params, where);
}

void map_rows(const MapRowsParams& params, const Launch& where) {
  require_covered(params.input.dtype);
  cuda::map_rows(params, where);
}

void chain_sample(const ChainParams& params, const Launch& where) {
  require_covered(params.draft.dtype);
  cuda::chain_sample(params, where);
}

void top_k_rows(const TopKParams& params, const Launch& where) {
  require_covered(params.input.dtype);
  cuda::launch_top_k(params, where);
}

}  // namespace flashinfer
