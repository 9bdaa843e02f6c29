// Booleans packed into bits on CUDA.
#include <flashinfer/cuda/quantization.cuh>

namespace flashinfer {

void pack_bits(const PackParams& params, const Launch& where) { cuda::pack_bits(params, where); }

void segment_pack_bits(const SegmentPackParams& params, const Launch& where) { cuda::segment_pack_bits(params, where); }

}  // namespace flashinfer
