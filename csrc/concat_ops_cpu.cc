// Concatenation of MLA's keys on the CPU.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/concat_ops.h>

namespace flashinfer {

void concat_mla_k(const ConcatMlaParams& params, const Launch&) { cpu::concat_mla_k(params); }

}  // namespace flashinfer
