// Booleans packed into bits on the CPU.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/quantization.h>

namespace flashinfer {

void pack_bits(const PackParams& params, const Launch&) { cpu::pack_bits(params); }

void segment_pack_bits(const SegmentPackParams& params, const Launch&) { cpu::segment_pack_bits(params); }

}  // namespace flashinfer
