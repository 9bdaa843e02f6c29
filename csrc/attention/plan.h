// The operator that makes plans, on the host.
#pragma once

#include "attention/call_arguments.h"
#include "attention/tables.h"

namespace flashinfer::binding {

inline void make_plan(StableIValue* stack, uint64_t, uint64_t) {
  const Check check("plan");
  const StableIValue* next = stack;
  const PlanArguments given = PlanArguments::take(next);
  const PlanNumbers numbers = PlanNumbers::of(check, View(given.numbers, "numbers"));
  plan_batch(check, PlanTables(given), numbers, [&](const PlanRequest& request, int64_t mean_rows) {
    const AttentionConfig config{static_cast<DType>(numbers.dtype_q),
                                 static_cast<DType>(numbers.dtype_kv),
                                 static_cast<DType>(numbers.dtype_o),
                                 check.int32("head_dim_qk", numbers.head_dim_qk),
                                 check.int32("head_dim_vo", numbers.head_dim_vo),
                                 check.int32("variant", numbers.variant),
                                 request.group};
    require_covered(config);
    return attention_limits(config, mean_rows, check.int32("tile_rows", numbers.tile_rows),
                            check.int32("device", numbers.device));
  });
}

}  // namespace flashinfer::binding
