// Operators of the all-to-all of experts.
#pragma once

#include "allreduce/group.h"
#include "binding/binding.h"

#include <flashinfer/common/moe_alltoall.h>

namespace flashinfer::binding {

// Return the group and the header of a call with at most `most` rows of each rank.
inline AllReduceParams moe_call(const Check& check, const Tensor& table, Collective collective, DType dtype,
                                int64_t most, int64_t row_bytes) {
  AllReduceParams p{};
  p.group = group_of(check, View(table, "workspace"));
  p.dtype = dtype, p.kind = kind_of(dtype, collective);
  if (most < 0 || most * p.group.ranks > INT32_MAX)
    check.fail("runtime_max_tokens_per_rank", "got " + std::to_string(most) + ", wanted 0 to 2^31 - 1 over all ranks");
  if (row_bytes > INT32_MAX) check.fail("payload", "got rows of more than 2^31 - 1 bytes");
  p.rows = most, p.row_bytes = static_cast<uint32_t>(row_bytes);
  return p;
}

inline void check_fits(const Check& check, int64_t bytes, const CommGroup& group) {
  if (bytes > group.slot_bytes)
    check.fail("workspace", "got " + std::to_string(group.slot_bytes) + " bytes, wanted at least " +
                                std::to_string(bytes) + " for these payloads");
}

inline void moe_dispatch(const Tensor& experts, const Tensor& payload0, const std::optional<Tensor>& payload1,
                         const std::optional<Tensor>& payload2, const std::optional<Tensor>& payload3,
                         const std::optional<Tensor>& payload4, const std::optional<Tensor>& payload5,
                         const Tensor& targets, const Tensor& order, const Tensor& table, int64_t most,
                         int64_t num_experts, int64_t ids, int64_t invalid_id, std::optional<bool> enable_pdl) {
  const Check check("moe_dispatch");
  const View selected(experts, "token_selected_experts"), kept(targets, "workspace"), ordered(order, "workspace");
  check.rank(selected, 2, 2);
  check.dtype(selected, {DType::kInt32});
  check.contiguous(selected);
  check.same_device(selected, ordered);
  check.dtype(kept, {DType::kInt32});
  check.shape(kept, {-1, selected.size(1)});
  check.contiguous(kept);
  check.same_device(kept, ordered);

  MoeDispatchParams p{};
  p.experts = static_cast<const int32_t*>(selected.data), p.targets = static_cast<int32_t*>(kept.data);
  p.tokens = selected.size(0), p.top_k = static_cast<int>(selected.size(1));
  p.num_experts = check.int32("num_experts", num_experts);
  p.ids = check.int32("expert_id_payload_index", ids);
  p.invalid_id = check.int32("invalid_token_expert_id", invalid_id);
  const std::optional<Tensor>* more[] = {&payload1, &payload2, &payload3, &payload4, &payload5};
  int64_t row_bytes = 0;
  for (int i = 0; i < kMaxPayloads; ++i) {
    if (i > 0 && !*more[i - 1]) break;
    const View x(i == 0 ? payload0 : **more[i - 1], "input_payloads");
    check.rank(x, 2, 2);
    check.dtype(x, {DType::kUInt8});
    check.contiguous(x);
    check.same_device(x, ordered);
    if (x.size(0) != p.tokens)
      check.fail(x, "got " + std::to_string(x.size(0)) + " rows, wanted " + std::to_string(p.tokens) +
                        " as token_selected_experts has");
    if (i == p.ids && x.size(1) % 4 != 0) check.fail(x, "got ids that are not int32");
    p.payloads[p.count++] = {x.data, x.size(1), 0};
    row_bytes += x.size(1);
  }
  if (p.ids < -1 || p.ids >= p.count)
    check.fail("expert_id_payload_index", "got " + std::to_string(p.ids) + ", wanted the number of a payload");
  p.call = moe_call(check, table, Collective::kMoeDispatch, DType::kUInt8, most, row_bytes);
  p.call.kind |= layout_bits(p);
  const int64_t ranks = p.call.group.ranks;
  if (p.tokens > most || p.tokens > kept.size(0))
    check.fail(selected, "got " + std::to_string(p.tokens) + " tokens, wanted at most " +
                             std::to_string(most < kept.size(0) ? most : kept.size(0)));
  if (num_experts < ranks || num_experts % ranks != 0)
    check.fail("num_experts", "got " + std::to_string(num_experts) + ", wanted a multiple of the ranks");
  int64_t end = whole_areas(ranks * most * 4);
  for (int i = 0; i < p.count; ++i) {
    p.payloads[i].offset = end;
    end += whole_areas(ranks * most * p.payloads[i].row_bytes);
  }
  check_fits(check, end, p.call.group);
  flashinfer::moe_dispatch(p, OnDevice(ordered, enable_pdl));
  if (!kOnCuda) check_alive(check, p.call.group);  // the call has ended
}

inline void moe_combine(const Tensor& payload, const Tensor& out, const Tensor& targets, const Tensor& order,
                        const Tensor& table, std::optional<bool> enable_pdl) {
  const Check check("moe_combine");
  const View x(payload, "payload"), y(out, "output"), kept(targets, "workspace"), ordered(order, "workspace");
  check.rank(x, 3, 3);
  check.floating(x);
  check.contiguous(x);
  check.aligned(x);
  check.rank(y, 2, 2);
  check.shape(y, {-1, x.size(2)});
  check.same_dtype(y, x);
  check.contiguous(y);
  check.aligned(y);
  check.dtype(kept, {DType::kInt32});
  check.rank(kept, 2, 2);
  check.contiguous(kept);
  for (const View* one : {&x, &y, &kept}) check.same_device(*one, ordered);
  check.no_overlap(y, x, false);
  MoeCombineParams p{};
  p.call = moe_call(check, table, Collective::kMoeCombine, x.dtype, x.size(1), x.size(2) * size_of(x.dtype));
  if (x.size(0) != p.call.group.ranks)
    check.fail(x, "got " + std::to_string(x.size(0)) + " parts, wanted those of " + std::to_string(p.call.group.ranks) +
                      " ranks");
  p.tokens = y.size(0), p.top_k = static_cast<int>(kept.size(1));
  if (p.tokens > x.size(1) || p.tokens > kept.size(0)) check.fail(y, "got more tokens than were sent");
  p.call.input = x.data, p.call.out = y.data, p.call.hidden = x.size(2);
  p.targets = static_cast<const int32_t*>(kept.data);
  const int64_t bytes = whole_areas(x.numel * size_of(x.dtype));
  check_fits(check, bytes, p.call.group);
  p.offset = p.call.group.slot_bytes - bytes;
  flashinfer::moe_combine(p, OnDevice(ordered, enable_pdl));
  if (!kOnCuda) check_alive(check, p.call.group);  // the call has ended
}

}  // namespace flashinfer::binding
