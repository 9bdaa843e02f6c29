// Sampling on the CPU, for the element types of this module.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/sampling/chain.h>
#include <flashinfer/cpu/sampling/sample.h>
#include <flashinfer/cpu/sampling/top_k.h>

#include "sampling_config.h"

namespace flashinfer {

int64_t longest_row(bool, const Launch&) { return kLongestRow; }

void sample_rows(const SampleParams& params, const Launch&) {
  DISPATCH_dtype(params.input.dtype, T, cpu::sample_rows(params, cpu::Format::of<T>()))
}

void map_rows(const MapRowsParams& params, const Launch&) {
  DISPATCH_dtype(params.input.dtype, T, cpu::map_rows(params, cpu::Format::of<T>()))
}

void chain_sample(const ChainParams& params, const Launch&) {
  DISPATCH_dtype(params.draft.dtype, T, cpu::chain_sample(params, cpu::Format::of<T>()))
}

void top_k_rows(const TopKParams& params, const Launch&) {
  DISPATCH_dtype(params.input.dtype, T, cpu::top_k_rows(params, cpu::Format::of<T>()))
}

}  // namespace flashinfer
