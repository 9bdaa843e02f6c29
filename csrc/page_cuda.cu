// Writes to paged caches on CUDA. Elements move as bytes, so no type is selected.
#include <flashinfer/cuda/page.cuh>

namespace flashinfer {

void append_paged(const AppendParams& params, const Launch& where) { cuda::append_paged(params, where); }

void batch_indices_positions(const PositionsParams& params, const Launch& where) {
  cuda::batch_indices_positions(params, where);
}

void block_offsets(const BlockOffsetsParams& params, const Launch& where) { cuda::block_offsets(params, where); }

}  // namespace flashinfer
