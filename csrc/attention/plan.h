// The operator that makes plans, on the host.
#pragma once

#include <algorithm>

#include "attention/setting.h"

namespace flashinfer::binding {

// A view of int32 numbers on the host.
inline const int32_t* host_int32s(const Check& check, const View& arg, int64_t count) {
  check.dtype(arg, {DType::kInt32});
  check.shape(arg, {count});
  check.contiguous(arg);
  if (arg.device_type != aoti_torch_device_type_cpu())
    check.fail(arg, "got a tensor of a device, wanted one on the CPU");
  return static_cast<const int32_t*>(arg.data);
}

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
    config = {static_cast<DType>(given.dtype_q),
              static_cast<DType>(given.dtype_kv),
              static_cast<DType>(given.dtype_o),
              check.int32("head_dim_qk", given.head_dim_qk),
              check.int32("head_dim_vo", given.head_dim_vo),
              check.int32("variant", given.variant),
              request.group};
    require_covered(config);
  }

  // Rows of all requests, whose lengths are looked at here.
  int64_t rows(const Check& check) const {
    int64_t rows = 0;
    for (int32_t b = 0; b < request.batch_size; ++b) {
      if (request.qo_len(b) < 0 || request.qo_start(b) < 0)
        check.fail("qo_indptr", "falls at request " + std::to_string(b) + ", wanted numbers from 0 that never fall");
      if (request.kv_lens[b] < 0) check.fail("kv_lens", "got a negative length at request " + std::to_string(b));
      rows += static_cast<int64_t>(request.qo_len(b)) * request.group;
    }
    if (rows > INT32_MAX) check.fail("qo_indptr", "got more than 2147483647 rows");
    return rows;
  }
};

inline void make_plan(StableIValue* stack, uint64_t, uint64_t) {
  const Check check("plan");
  const StableIValue* next = stack;
  const PlanArguments given = PlanArguments::take(next);
  PlanInput input(check, given);
  PlanRequest& request = input.request;
  const int64_t rows = input.rows(check), batch_size = request.batch_size;
  const WorkLimits limits =
      attention_limits(input.config, batch_size > 0 ? (rows + batch_size - 1) / batch_size : 0,
                       check.int32("tile_rows", given.tile_rows), check.int32("device", given.device));
  request.tile_rows = limits.tile_rows, request.places = limits.places;
  request.min_chunk = limits.min_chunk, request.kv_step = limits.kv_step;
  const Plan made = plan(request);

  // What no other lengths of as many requests and rows can exceed.
  const int64_t most_tiles = rows / limits.tile_rows + batch_size;
  const int64_t most_pieces = limits.places / request.num_kv_heads + 1;
  const View buffer(given.buffer, "buffer");
  check.dtype(buffer, {DType::kInt32});
  check.contiguous(buffer);
  if (buffer.device_type != aoti_torch_device_type_cpu()) check.fail(buffer, "got a tensor of a device");
  if (buffer.numel < kPlanHeader) check.fail(buffer, "got fewer than 16 elements");
  auto* data = static_cast<int32_t*>(buffer.data);
  const int64_t items = static_cast<int64_t>(made.items.size()), merges = static_cast<int64_t>(made.merges.size());
  if ((given.max_items > 0 && items > given.max_items) || (given.max_merges > 0 && merges > given.max_merges))
    check.fail("plan", "got " + std::to_string(items) + " work items and " + std::to_string(merges) +
                           " merges, and the buffers of this wrapper hold " + std::to_string(given.max_items) +
                           " and " + std::to_string(given.max_merges));
  const PlanLayout layout(batch_size, given.max_items > 0 ? given.max_items : items,
                          given.max_items > 0 ? given.max_merges : merges);
  std::fill(data, data + kPlanHeader, 0);
  data[kItems] = static_cast<int32_t>(items), data[kMerges] = static_cast<int32_t>(merges);
  data[kTileRows] = limits.tile_rows, data[kSlotRows] = made.slot_rows, data[kSlots] = made.num_slots;
  data[kMaxItems] = static_cast<int32_t>(most_tiles + most_pieces);
  data[kMaxMerges] = static_cast<int32_t>(most_tiles < most_pieces ? most_tiles : most_pieces);
  data[kMaxSlots] = static_cast<int32_t>(2 * most_pieces);
  data[kNeeded] = static_cast<int32_t>(layout.size);
  if (buffer.numel < layout.size) return;  // the caller reads what is needed and comes again
  for (int32_t b = 0; b < request.batch_size; ++b) {
    data[layout.qo_lens + b] = request.qo_len(b), data[layout.kv_lens + b] = request.kv_lens[b];
  }
  std::copy(made.merges.begin(), made.merges.end(), reinterpret_cast<MergeItem*>(data + layout.merges));
  std::copy(made.items.begin(), made.items.end(), reinterpret_cast<WorkItem*>(data + layout.items));
}

}  // namespace flashinfer::binding
