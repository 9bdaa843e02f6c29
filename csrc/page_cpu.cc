// Writes to paged caches on the CPU. Elements move as bytes, so no type is selected.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/page.h>

namespace flashinfer {

void append_paged(const AppendParams& params, const Launch&) { cpu::append_paged(params); }

void batch_indices_positions(const PositionsParams& params, const Launch&) { cpu::batch_indices_positions(params); }

void block_offsets(const BlockOffsetsParams& params, const Launch&) { cpu::block_offsets(params); }

}  // namespace flashinfer
