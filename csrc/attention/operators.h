// What the bindings of decode and prefill share: a module's operators, in a namespace of its own.
//
// run() computes attention of all requests, by a plan, or of one request without. plan() fills a buffer on the host
// with the lists of a schedule; a copy of it on the device is what run() takes. Neither reads a tensor of a GPU.
// Modules of the library's own variants have run() in two parts besides: bind(), and run_bound() with what is left.
#pragma once

#include "attention/plan.h"
#include "attention/run.h"
#if defined(FLASHINFER_OWN_VARIANTS)
#include "attention/bound.h"
#else
#define FLASHINFER_ATTENTION_BOUND_LIBRARY(ns, key)
#endif

namespace flashinfer::binding {

#define FLASHINFER_ATTENTION_RUN \
  "run(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, " FLASHINFER_ATTENTION_SETTING("(c!)") ") -> ()"

inline void run(StableIValue* stack, uint64_t count, uint64_t) {
  const Check check(FLASHINFER_ATTENTION_NAME);
  Arguments arguments(stack, count, FLASHINFER_ATTENTION_RUN);
  const Tensor q = arguments.take<Tensor>(), k = arguments.take<Tensor>(), v = arguments.take<Tensor>();
  const Tensor out = arguments.take<Tensor>();
  const OptionalTensor lse = arguments.take<OptionalTensor>();
  const View queries(q, "q"), keys(k, "k"), values(v, "v"), results(out, "out");
  Place place;
  place.must_hold(check, queries);
  const Setting setting(check, arguments, place);
  const Inputs inputs(check, queries, keys, values, setting);
  inputs.check_out(check, results);
  const AttentionConfig config = inputs.config(results.dtype, setting.variant);
  require_covered(config);
  float* lse_data = nullptr;
  if (lse) {
    const View view(*lse, "lse");
    inputs.check_lse(check, view, results);
    lse_data = static_cast<float*>(view.data);
  }
  Params params = setting.params;
  attend(check, params, setting, inputs, results, lse_data, config, q);
}

// plan() is registered for every device: its tensors are on the host whatever the module is for.
#define FLASHINFER_ATTENTION_LIBRARY FLASHINFER_ATTENTION_LIBRARY_(FLASHINFER_MODULE, FLASHINFER_DISPATCH_KEY)
#define FLASHINFER_ATTENTION_LIBRARY_(ns, key) FLASHINFER_ATTENTION_LIBRARY__(ns, key)
#define FLASHINFER_ATTENTION_LIBRARY__(ns, key)                                                                   \
  STABLE_TORCH_LIBRARY(ns, m) {                                                                                   \
    m.def(FLASHINFER_ATTENTION_RUN);                                                                              \
    m.def(FLASHINFER_ATTENTION_PLAN);                                                                             \
  }                                                                                                               \
  STABLE_TORCH_LIBRARY_IMPL(ns, key, m) { m.impl("run", flashinfer::binding::run); }                              \
  STABLE_TORCH_LIBRARY_IMPL(ns, CompositeExplicitAutograd, m) { m.impl("plan", flashinfer::binding::make_plan); } \
  FLASHINFER_ATTENTION_BOUND_LIBRARY(ns, key)

}  // namespace flashinfer::binding
