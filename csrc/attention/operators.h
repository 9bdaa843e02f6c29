// The operators of a module of decode or prefill, in a namespace of its own.
//
// run() computes attention of all requests by a plan, or of one request without a plan. plan() fills a host
// buffer with the lists of a schedule, and run() takes a device copy of it. Neither reads a tensor of a GPU.
// Modules of built-in variants also split run() into bind() and run_bound(), which takes the remaining
// arguments.
#pragma once

#include "attention/plan.h"
#include "attention/run.h"
#if defined(FLASHINFER_BUILTIN_VARIANTS)
#include "attention/bound.h"
#else
#define FLASHINFER_ATTENTION_BOUND_LIBRARY(ns, key)
#endif

namespace flashinfer::binding {

inline void run(StableIValue* stack, uint64_t, uint64_t) {
  const Check check(FLASHINFER_ATTENTION_NAME);
  const StableIValue* next = stack;
  const TensorArguments tensors = TensorArguments::take(next);
  const RunArguments given = RunArguments::take(next);
  const VariantArguments parameters = VariantArguments::take(next);
  const View q(tensors.q, "q"), k(tensors.k, "k"), v(tensors.v, "v"), out(tensors.out, "out");
  ArgumentDevice call_device;
  call_device.require(check, q);
  const CallArguments arguments(check, given, parameters, call_device);
  const Inputs inputs(check, q, k, v, arguments);
  inputs.check_out(check, out);
  const AttentionConfig config = inputs.config(out.dtype, arguments.variant);
  require_covered(config);
  float* lse_data = nullptr;
  if (tensors.lse) {
    const View lse(*tensors.lse, "lse");
    inputs.check_lse(check, lse, out);
    lse_data = static_cast<float*>(lse.data);
  }
  Params params = arguments.params;
  attend(check, params, arguments, inputs, out, lse_data, config, tensors.q);
}

// plan() is registered for every device: its tensors are on the host on every backend.
#define FLASHINFER_ATTENTION_LIBRARY FLASHINFER_ATTENTION_LIBRARY_(FLASHINFER_MODULE, FLASHINFER_DISPATCH_KEY)
#define FLASHINFER_ATTENTION_LIBRARY_(ns, key) FLASHINFER_ATTENTION_LIBRARY__(ns, key)
#define FLASHINFER_ATTENTION_LIBRARY__(ns, key)                                                                   \
  STABLE_TORCH_LIBRARY(ns, m) {                                                                                   \
    using namespace flashinfer::binding;                                                                          \
    m.def(schema_of<TensorArguments, RunArguments, VariantArguments>("run").c_str());                             \
    m.def(schema_of<PlanArguments>("plan").c_str());                                                              \
  }                                                                                                               \
  STABLE_TORCH_LIBRARY_IMPL(ns, key, m) { m.impl("run", flashinfer::binding::run); }                              \
  STABLE_TORCH_LIBRARY_IMPL(ns, CompositeExplicitAutograd, m) { m.impl("plan", flashinfer::binding::make_plan); } \
  FLASHINFER_ATTENTION_BOUND_LIBRARY(ns, key)

}  // namespace flashinfer::binding
