// The buffer of kernel events, in modules that are built with events.
#pragma once

#include <flashinfer/common/profiler.h>

#include "attention/lists.h"

namespace flashinfer::binding {

template <typename Params>
void put_profiler(const Check& check, Params& params, const Tensor& buffer, ArgumentDevice& call_device) {
  const View words(buffer, "profiler_buffer");
  check.dtype(words, {DType::kInt64});
  check.rank(words, 1, 1);
  check.contiguous(words);
  call_device.require(check, words);
  if (words.numel < 1) check.fail(words, "got no element, wanted 1 or more");
  params.profiler.words = static_cast<uint64_t*>(words.data), params.profiler.size = words.numel;
}

// Find the buffer among a variant's parameters. Modules without events have none.
template <typename Params, typename Parameters>
void put_profiler_of(const Check& check, Params& params, const Parameters& parameters, ArgumentDevice& call_device) {
  if constexpr (Params::kProfiler) put_profiler(check, params, parameters.profiler_buffer, call_device);
}

}  // namespace flashinfer::binding
