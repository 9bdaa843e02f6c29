// The operator that makes plans, on the host.
#pragma once

#include "attention/setting.h"

namespace flashinfer::binding {

struct PlanInput {
  PlanRequest request{};
  AttentionConfig config{};

  PlanInput(const Check& check, const PlanArguments& given) {
    const View kv_lens(given.kv_lens, "kv_lens");
    check.rank(kv_lens, 1, 1);
    const int64_t batch_size = kv_lens.size(0);
    if (batch_size > INT32_MAX / 64) check.fail(kv_lens, "got too many requests");
    request.batch_size = static_cast<int32_t>(batch_size);
    request.kv_lens = host_int32s(check, kv_lens, batch_size);
    if (given.qo_indptr) request.qo_indptr = host_int32s(check, View(*given.qo_indptr, "qo_indptr"), batch_size + 1);
    if (given.num_kv_heads < 1 || given.num_qo_heads < 1 || given.num_qo_heads % given.num_kv_heads != 0)
      check.fail("num_qo_heads", "got " + std::to_string(given.num_qo_heads) + ", wanted a multiple of num_kv_heads, " +
                                     std::to_string(given.num_kv_heads));
    request.num_kv_heads = check.int32("num_kv_heads", given.num_kv_heads);
    request.group = check.int32("num_qo_heads", given.num_qo_heads / given.num_kv_heads);
    request.mask_mode = mask_mode_of(check, given.mask_mode);
    request.window_left = check.int32("window_left", given.window_left);
    request.split = given.split;
    request.kv_chunk = check.int32("kv_chunk", given.kv_chunk);
    config = {static_cast<DType>(given.dtype_q),
              static_cast<DType>(given.dtype_kv),
              static_cast<DType>(given.dtype_o),
              check.int32("head_dim_qk", given.head_dim_qk),
              check.int32("head_dim_vo", given.head_dim_vo),
              check.int32("variant", given.variant),
              request.group};
    require_covered(config);
  }
};

inline void make_plan(StableIValue* stack, uint64_t, uint64_t) {
  const Check check("plan");
  const StableIValue* next = stack;
  const PlanArguments given = PlanArguments::take(next);
  PlanInput input(check, given);
  PlanRequest& request = input.request;
  const int64_t rows = rows_of_requests(check, request), batch_size = request.batch_size;
  const WorkLimits limits =
      attention_limits(input.config, batch_size > 0 ? (rows + batch_size - 1) / batch_size : 0,
                       check.int32("tile_rows", given.tile_rows), check.int32("device", given.device));
  request.tile_rows = limits.tile_rows, request.places = limits.places;
  request.min_chunk = limits.min_chunk, request.kv_step = limits.kv_step;
  request.item_keys = limits.item_keys, request.merge_keys = limits.merge_keys;
  request.whole_keys = limits.whole_keys;
  write_lists(check, View(given.buffer, "buffer"), request, rows, given.max_items, given.max_merges);
}

}  // namespace flashinfer::binding
