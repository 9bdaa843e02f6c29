// Operator that writes the lists of a schedule from tensors of lengths, without a host read.
#include "attention/lists.h"

#include <algorithm>
#include <optional>

#include <flashinfer/attention/batch_schedule.h>

namespace flashinfer::binding {
namespace {

using OptionalTensor = std::optional<Tensor>;

template <typename T>
T* data_of(const Check& check, const View& arg, DType dtype, int64_t size, const View& like) {
  check.dtype(arg, {dtype});
  check.shape(arg, {size});
  check.contiguous(arg);
  check.aligned(arg);
  check.same_device(arg, like);
  return static_cast<T*>(arg.data);
}

void schedule_batch_out(const Tensor& plan, const Tensor& kv_indptr, const OptionalTensor& numbers,
                        const Tensor& seq_lens, const OptionalTensor& qo_indptr, const OptionalTensor& sm_scale,
                        int64_t num_tokens, int64_t q_len, int64_t most_keys, int64_t table_stride,
                        int64_t num_kv_heads, int64_t group, int64_t tile_rows, int64_t mask_mode, int64_t window_left,
                        int64_t workers) {
  const Check check("schedule_batch");
  const View lists(plan, "plan"), indptr(kv_indptr, "kv_indptr"), lens(seq_lens, "seq_lens");
  check.rank(lens, 1, 1);
  const int64_t batch_size = lens.size(0);
  for (const auto& [name, value, least] :
       {std::tuple{"num_tokens", num_tokens, 0}, std::tuple{"q_len", q_len, 0}, std::tuple{"most_keys", most_keys, 0},
        std::tuple{"table_stride", table_stride, 0}, std::tuple{"num_kv_heads", num_kv_heads, 1},
        std::tuple{"group", group, 1}, std::tuple{"tile_rows", tile_rows, 1}, std::tuple{"workers", workers, 1},
        std::tuple{"batch_size * table_stride", batch_size * table_stride, 0},
        std::tuple{"batch_size * q_len", batch_size * q_len, 0}, std::tuple{"q_len * group", q_len * group, 0}})
    if (check.int32(name, value) < least)
      check.fail(name, "got " + std::to_string(value) + ", wanted " + std::to_string(least) + " or more");
  if (mask_mode != 0 && mask_mode != 1) check.fail("mask_mode", "got " + std::to_string(mask_mode) + ", wanted 0 or 1");

  BatchScheduleParams params{};
  params.seq_lens = data_of<const int32_t>(check, lens, DType::kInt32, batch_size, lens);
  params.kv_indptr = data_of<int32_t>(check, indptr, DType::kInt32, batch_size + 1, lens);
  if (qo_indptr)
    params.qo_indptr =
        data_of<const int32_t>(check, View(*qo_indptr, "qo_indptr"), DType::kInt32, batch_size + 1, lens);
  if (sm_scale.has_value() != numbers.has_value()) check.fail("numbers", "wanted numbers together with sm_scale");
  if (numbers) {
    params.numbers = data_of<double>(check, View(*numbers, "numbers"), DType::kFloat64, 4, lens);
    params.sm_scale = data_of<const float>(check, View(*sm_scale, "sm_scale"), DType::kFloat32, 1, lens);
  }
  params.batch_size = static_cast<int32_t>(batch_size), params.num_tokens = static_cast<int32_t>(num_tokens);
  params.q_len = static_cast<int32_t>(q_len),
  params.most_keys = static_cast<int32_t>(std::min<int64_t>(most_keys, batch_schedule::kMaxKeys));
  params.table_stride = static_cast<int32_t>(table_stride);
  params.num_kv_heads = static_cast<int32_t>(num_kv_heads), params.group = FastDiv(static_cast<uint32_t>(group));
  params.tile_rows = static_cast<int32_t>(tile_rows), params.workers = FastDiv(static_cast<uint32_t>(workers));
  params.mask_mode = static_cast<MaskMode>(mask_mode), params.window_left = check.int32("window_left", window_left);

  const int64_t tiles = batch_schedule::max_tiles(batch_size, q_len, group, tile_rows);
  const int64_t merges = batch_schedule::max_merges(tiles, workers);
  const PlanLayout layout(batch_size, batch_schedule::max_items(tiles, workers), merges);
  auto* data = data_of<int32_t>(check, lists, DType::kInt32, layout.size + merges * num_kv_heads, lens);
  if (reinterpret_cast<uintptr_t>(data) % alignof(WorkItem) != 0) check.fail(lists, "is not aligned to 32 bytes");
  for (const View* arg : {&lens, &indptr}) check.no_overlap(lists, *arg, false);
  params.counts = data, params.qo_lens = data + layout.qo_lens, params.kv_lens = data + layout.kv_lens;
  params.merges = reinterpret_cast<MergeItem*>(data + layout.merges);
  params.items = reinterpret_cast<WorkItem*>(data + layout.items);
  params.tickets = reinterpret_cast<uint32_t*>(data + layout.size);
  const OnDevice where(lens);
  schedule_batch(params, where);
}

FLASHINFER_LIBRARY(m) { m.impl("schedule_batch", box<schedule_batch_out>); }

}  // namespace
}  // namespace flashinfer::binding
