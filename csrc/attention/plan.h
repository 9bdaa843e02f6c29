// The operator that makes plans, on the host.
#pragma once

#include <algorithm>

#include "attention/arguments.h"

namespace flashinfer::binding {

#define FLASHINFER_ATTENTION_PLAN                                                                                    \
  "plan(Tensor(a!) buffer, Tensor? qo_indptr, Tensor kv_lens, int num_qo_heads, int num_kv_heads, int head_dim_qk, " \
  "int head_dim_vo, int dtype_q, int dtype_kv, int dtype_o, int mask_mode, int window_left, int device, "            \
  "int max_items, int max_merges, int tile_rows, bool split, int variant) -> ()"

// A view of int32 numbers on the host.
inline const int32_t* host_int32s(const Check& check, const View& arg, int64_t count) {
  check.dtype(arg, {DType::kInt32});
  check.shape(arg, {count});
  check.contiguous(arg);
  if (arg.device_type != aoti_torch_device_type_cpu())
    check.fail(arg, "got a tensor of a device, wanted one on the CPU");
  return static_cast<const int32_t*>(arg.data);
}

inline void make_plan(StableIValue* stack, uint64_t count, uint64_t) {
  const Check check("plan");
  Arguments arguments(stack, count, FLASHINFER_ATTENTION_PLAN);
  const Tensor buffer_tensor = arguments.take<Tensor>();
  const OptionalTensor qo_indptr = arguments.take<OptionalTensor>();
  const Tensor kv_lens_tensor = arguments.take<Tensor>();
  const View buffer(buffer_tensor, "buffer"), kv_lens(kv_lens_tensor, "kv_lens");
  check.rank(kv_lens, 1, 1);
  const int64_t batch_size = kv_lens.size(0);
  if (batch_size > INT32_MAX / 64) check.fail(kv_lens, "got too many requests");
  PlanRequest request{};
  request.batch_size = static_cast<int32_t>(batch_size);
  request.kv_lens = host_int32s(check, kv_lens, batch_size);
  if (qo_indptr) request.qo_indptr = host_int32s(check, View(*qo_indptr, "qo_indptr"), batch_size + 1);
  const int64_t num_qo_heads = arguments.take<int64_t>(), num_kv_heads = arguments.take<int64_t>();
  if (num_kv_heads < 1 || num_qo_heads < 1 || num_qo_heads % num_kv_heads != 0)
    check.fail("num_qo_heads", "got " + std::to_string(num_qo_heads) + ", wanted a multiple of num_kv_heads, " +
                                   std::to_string(num_kv_heads));
  request.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  request.group = static_cast<int32_t>(num_qo_heads / num_kv_heads);
  AttentionConfig config{};
  config.head_dim_qk = arguments.take_int32(check, "head_dim_qk");
  config.head_dim_vo = arguments.take_int32(check, "head_dim_vo");
  config.q = static_cast<DType>(arguments.take<int64_t>()), config.kv = static_cast<DType>(arguments.take<int64_t>());
  config.o = static_cast<DType>(arguments.take<int64_t>());
  request.mask_mode = mask_mode_of(check, arguments.take<int64_t>());
  request.window_left = arguments.take_int32(check, "window_left");
  const int32_t device = arguments.take_int32(check, "device");
  const int64_t max_items = arguments.take<int64_t>(), max_merges = arguments.take<int64_t>();
  const int32_t tile_rows = arguments.take_int32(check, "tile_rows");
  request.split = arguments.take<bool>();
  config.variant = arguments.take_int32(check, "variant");
  require_covered(config);

  int64_t rows = 0;
  for (int32_t b = 0; b < request.batch_size; ++b) {
    if (request.qo_len(b) < 0 || request.qo_start(b) < 0)
      check.fail("qo_indptr", "falls at request " + std::to_string(b) + ", wanted numbers from 0 that never fall");
    if (request.kv_lens[b] < 0) check.fail("kv_lens", "got a negative length at request " + std::to_string(b));
    rows += static_cast<int64_t>(request.qo_len(b)) * request.group;
  }
  if (rows > INT32_MAX) check.fail("qo_indptr", "got more than 2147483647 rows");
  const WorkLimits limits =
      attention_limits(config, batch_size > 0 ? (rows + batch_size - 1) / batch_size : 0, tile_rows, device);
  request.tile_rows = limits.tile_rows, request.places = limits.places;
  request.min_chunk = limits.min_chunk, request.kv_step = limits.kv_step;
  const Plan made = plan(request);

  // What no other lengths of as many requests and rows can exceed.
  const int64_t most_tiles = rows / limits.tile_rows + batch_size;
  const int64_t most_pieces = limits.places / request.num_kv_heads + 1;
  check.dtype(buffer, {DType::kInt32});
  check.contiguous(buffer);
  if (buffer.device_type != aoti_torch_device_type_cpu()) check.fail(buffer, "got a tensor of a device");
  if (buffer.numel < kPlanHeader) check.fail(buffer, "got fewer than 16 elements");
  auto* data = static_cast<int32_t*>(buffer.data);
  const int64_t items = static_cast<int64_t>(made.items.size()), merges = static_cast<int64_t>(made.merges.size());
  if ((max_items > 0 && items > max_items) || (max_merges > 0 && merges > max_merges))
    check.fail("plan", "got " + std::to_string(items) + " work items and " + std::to_string(merges) +
                           " merges, and the buffers of this wrapper hold " + std::to_string(max_items) + " and " +
                           std::to_string(max_merges));
  const PlanLayout layout(batch_size, max_items > 0 ? max_items : items, max_items > 0 ? max_merges : merges);
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
