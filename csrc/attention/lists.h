// The lists of a plan in a buffer: written on the host, and read from its device copy.
#pragma once

#include <algorithm>
#include <string>

#include <flashinfer/attention/schedule.h>

#include "binding/binding.h"

namespace flashinfer::binding {

// The plan's buffer, int32: a header, lengths of queries and keys, merges, items, and a ticket per merge and
// head.
constexpr int64_t kPlanHeader = 16;
enum PlanField {
  kItems,
  kMerges,
  kTileRows,
  kSlotRows,
  kSlots,
  kMaxItems,
  kMaxMerges,
  kMaxSlots,
  kNeeded,
  kValid,  // 0: tables do not fit each other
  kNumQueries,
  kFirstQuery,
  kKvSize,
  kKvStart,
  kKvEnd,
};

struct PlanLayout {
  int64_t qo_lens, kv_lens, merges, items, size;

  PlanLayout(int64_t batch_size, int64_t max_items, int64_t max_merges) {
    qo_lens = kPlanHeader, kv_lens = qo_lens + batch_size;
    merges = (kv_lens + batch_size + 7) / 8 * 8, items = merges + 8 * max_merges, size = items + 8 * max_items;
  }
};

// Return the offset of a table that follows `used` elements: the next multiple of 16 bytes.
constexpr int64_t aligned_offset(int64_t used) { return (used + 3) / 4 * 4; }

// Device of a call. The first tensor sets it, and all other tensors must be on it.
class ArgumentDevice {
 public:
  void require(const Check& check, const View& arg) {
    if (first_ == nullptr) first_ = arg.name, type_ = arg.device_type, index_ = arg.device;
    if (arg.device_type != type_ || arg.device != index_)
      check.fail(arg, "is on " + device_text(arg.device_type, arg.device) + ", another device than " + first_ + "'s " +
                          device_text(type_, index_));
  }

 private:
  const char* first_ = nullptr;
  int type_ = 0, index_ = 0;
};

// Return int32 numbers on the host, after checks.
inline const int32_t* host_int32s(const Check& check, const View& arg, int64_t count) {
  check.dtype(arg, {DType::kInt32});
  check.shape(arg, {count});
  check.contiguous(arg);
  if (arg.device_type != aoti_torch_device_type_cpu())
    check.fail(arg, "got a tensor of a device, wanted one on the CPU");
  return static_cast<const int32_t*>(arg.data);
}

// Return the number of rows of all requests, and check their lengths.
inline int64_t rows_of_requests(const Check& check, const PlanRequest& request) {
  int64_t rows = 0;
  for (int32_t b = 0; b < request.batch_size; ++b) {
    if (request.qo_len(b) < 0 || request.qo_start(b) < 0)
      check.fail("qo_indptr",
                 "decreases at request " + std::to_string(b) + ", wanted numbers from 0 that never decrease");
    if (request.kv_lens[b] < 0) check.fail("kv_lens", "got a negative length at request " + std::to_string(b));
    rows += static_cast<int64_t>(request.qo_len(b)) * request.group;
  }
  if (rows > INT32_MAX) check.fail("qo_indptr", "got more than 2147483647 rows");
  return rows;
}

// Return the buffer of a plan after a check that it has room for a header.
inline int32_t* plan_header(const Check& check, const View& buffer) {
  check.dtype(buffer, {DType::kInt32});
  check.contiguous(buffer);
  if (buffer.device_type != aoti_torch_device_type_cpu()) check.fail(buffer, "got a tensor of a device");
  if (buffer.numel < kPlanHeader) check.fail(buffer, "got fewer than 16 elements");
  return static_cast<int32_t*>(buffer.data);
}

// Make the plan of `request` and write it. `rows`: an upper bound on the rows of queries. `max_items` and
// `max_merges`: the capacity of the lists if a captured graph fixes it, otherwise 0. A buffer that is too
// small gets only the header, which contains the needed size.
inline void write_lists(const Check& check, const View& buffer, const PlanRequest& request, int64_t rows,
                        int64_t max_items, int64_t max_merges) {
  const Plan made = plan(request);
  const int64_t batch_size = request.batch_size;
  // Bounds for all lengths of as many requests and rows.
  const int64_t max_tiles = rows / request.tile_rows + batch_size;
  const int64_t max_pieces = request.concurrency / request.num_kv_heads + 1;
  int32_t* data = plan_header(check, buffer);
  const int64_t items = static_cast<int64_t>(made.items.size()), merges = static_cast<int64_t>(made.merges.size());
  if ((max_items > 0 && items > max_items) || (max_merges > 0 && merges > max_merges))
    check.fail("plan", "got " + std::to_string(items) + " work items and " + std::to_string(merges) +
                           " merges, and the buffers of this wrapper hold " + std::to_string(max_items) + " and " +
                           std::to_string(max_merges));
  const int64_t room_of_merges = max_items > 0 ? max_merges : merges;
  const PlanLayout layout(batch_size, max_items > 0 ? max_items : items, room_of_merges);
  const int64_t needed = layout.size + room_of_merges * request.num_kv_heads;
  data[kItems] = static_cast<int32_t>(items), data[kMerges] = static_cast<int32_t>(merges);
  data[kTileRows] = request.tile_rows, data[kSlotRows] = made.slot_rows, data[kSlots] = made.num_slots;
  data[kMaxItems] = static_cast<int32_t>(max_tiles + max_pieces);
  data[kMaxMerges] = static_cast<int32_t>(max_tiles < max_pieces ? max_tiles : max_pieces);
  data[kMaxSlots] = static_cast<int32_t>(2 * max_pieces);
  data[kNeeded] = static_cast<int32_t>(needed);
  if (buffer.numel < needed) return;
  for (int32_t b = 0; b < request.batch_size; ++b) {
    data[layout.qo_lens + b] = request.qo_len(b), data[layout.kv_lens + b] = request.kv_lens[b];
  }
  std::copy(made.merges.begin(), made.merges.end(), reinterpret_cast<MergeItem*>(data + layout.merges));
  std::copy(made.items.begin(), made.items.end(), reinterpret_cast<WorkItem*>(data + layout.items));
  std::fill(data + layout.size, data + needed, 0);
}

// Point the parameters to the lists of a plan. Return the number of tickets.
inline int64_t use_plan(const Check& check, AttentionParams& params, const View& plan, int64_t batch_size) {
  check.dtype(plan, {DType::kInt32});
  check.contiguous(plan);
  const PlanLayout layout(batch_size, params.max_items, params.max_merges);
  if (plan.numel < layout.size)
    check.fail(plan, "got " + std::to_string(plan.numel) + " elements, wanted " + std::to_string(layout.size));
  if (reinterpret_cast<uintptr_t>(plan.data) % alignof(WorkItem) != 0) check.fail(plan, "is not aligned to 32 bytes");
  const auto* data = static_cast<const int32_t*>(plan.data);
  params.counts = data;
  params.qo_lens = data + layout.qo_lens, params.kv_lens = data + layout.kv_lens;
  params.merges = reinterpret_cast<const MergeItem*>(data + layout.merges);
  params.items = reinterpret_cast<const WorkItem*>(data + layout.items);
  params.tickets =
      static_cast<uint32_t*>(plan.data) + layout.size;  // the only part that kernels write; they restore it
  return plan.numel - layout.size;
}

// Memory for partial states, or null.
struct Partials {
  void* data = nullptr;
  int64_t bytes = 0;
};

inline int64_t bytes_of_partials(const AttentionParams& params, int64_t max_slots, int64_t dim) {
  return 4 * max_slots * params.num_kv_heads * params.slot_rows * (dim + 2);
}

inline void use_partials(const Check& check, AttentionParams& params, const Partials& workspace, int64_t max_slots,
                         int64_t dim) {
  const int64_t rows = max_slots * params.num_kv_heads * params.slot_rows;
  const int64_t needed = bytes_of_partials(params, max_slots, dim);
  if (workspace.bytes < needed)
    check.fail("float_workspace",
               "got " + std::to_string(workspace.bytes) + " bytes, wanted " + std::to_string(needed));
  params.partial_o = static_cast<float*>(workspace.data);
  params.partial_ml = reinterpret_cast<PartialSoftmax*>(params.partial_o + rows * dim);
}

}  // namespace flashinfer::binding
