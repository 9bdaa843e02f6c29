// Operators of the sampling family.
#include "binding/binding.h"

#include <flashinfer/common/sampling.h>

#include <tuple>

namespace flashinfer::binding {
namespace {

using Maybe = std::optional<Tensor>;

RowsOf rows_of(const Check& check, const View& x, int64_t rank) {
  check.rank(x, rank, rank);
  check.floating(x);
  check.last_contiguous(x);
  check.aligned(x);
  if (x.size(-1) < 1 || x.size(-1) > kLongestRow)
    check.fail(x, "got " + std::to_string(x.size(-1)) + " elements in a row, wanted 1 to 16777216");
  return {x.data, x.stride(-2), x.dtype};
}

// On a GPU the sums of all chunks of a row must fit into shared memory.
void check_length(const Check& check, const View& x, bool keeps_maxima, const Launch& where) {
  const int64_t limit = longest_row(keeps_maxima, where);
  if (x.size(-1) > limit)
    check.fail(x, "got " + std::to_string(x.size(-1)) + " elements in a row, wanted at most " + std::to_string(limit) +
                      " on this device");
}

// Return an argument with one value, one per output, or one per row.
PerRow list_of(const Check& check, const Maybe& tensor, const char* name, const View& like,
               std::initializer_list<DType> dtypes, int64_t outputs, int64_t rows) {
  PerRow number{};
  if (!tensor) return number;
  const View list(*tensor, name);
  check.rank(list, 1, 1);
  check.dtype(list, dtypes);
  check.same_device(list, like);
  check.aligned(list);
  const int64_t n = list.size(0);
  if (n != 1 && n != outputs && n != rows) {
    check.fail(list, "got " + std::to_string(n) + " elements, wanted 1, " + std::to_string(outputs) + " or " +
                         std::to_string(rows));
  }
  number.data = list.data, number.dtype = list.dtype;
  number.output_stride = n == outputs && n != 1 ? list.stride(0) : 0;
  number.row_stride = n == outputs || n == 1 ? 0 : list.stride(0);
  return number;
}

PerRow reals(const Check& check, const Maybe& tensor, double value, const char* name, const View& like, int64_t outputs,
             int64_t rows) {
  PerRow number = list_of(check, tensor, name, like, {DType::kFloat32, DType::kFloat64}, outputs, rows);
  number.real = value;
  return number;
}

PerRow integers(const Check& check, const Maybe& tensor, int64_t value, const char* name, const View& like,
                int64_t outputs, int64_t rows) {
  PerRow number = list_of(check, tensor, name, like, {DType::kInt32, DType::kInt64}, outputs, rows);
  number.integer = value;
  return number;
}

Random random_of(const Check& check, const View& like, int64_t outputs, const Maybe& seed, int64_t seed_value,
                 const Maybe& offset, int64_t offset_value, const Maybe& slot, int64_t slot_value) {
  return {.seed = integers(check, seed, seed_value, "seed", like, outputs, outputs),
          .offset = integers(check, offset, offset_value, "offset", like, outputs, outputs),
          .slot = integers(check, slot, slot_value, "slot", like, outputs, outputs),
          .has_slot = slot.has_value() || slot_value >= 0};
}

// Check indices on the CPU, where they are readable. On CUDA an output with a wrong index is invalid.
void check_indices(const Check& check, const View& list, const RowsOf& indices, int64_t num_rows) {
  if (kOnCuda) return;
  for (int64_t i = 0; i < list.size(0); ++i) {
    const int64_t row = list.dtype == DType::kInt64 ? static_cast<const int64_t*>(indices.data)[i * indices.stride]
                                                    : static_cast<const int32_t*>(indices.data)[i * indices.stride];
    if (row < 0 || row >= num_rows) {
      check.fail("indices", "got " + std::to_string(row) + ", wanted 0 to " + std::to_string(num_rows - 1),
                 "IndexError");
    }
  }
}

std::tuple<Tensor, Tensor> sample_from_rows(const Tensor& input, bool is_logits, const Maybe& temperature,
                                            double temperature_value, const Maybe& top_k, int64_t top_k_value,
                                            const Maybe& top_p, double top_p_value, const Maybe& min_p,
                                            double min_p_value, bool top_k_first, const Maybe& indices,
                                            const Maybe& seed, int64_t seed_value, const Maybe& offset,
                                            int64_t offset_value, const Maybe& slot, int64_t slot_value) {
  const Check check("sample_from_rows");
  const View x(input, is_logits ? "logits" : "probs");
  SampleParams p{};
  p.input = rows_of(check, x, 2);
  p.is_logits = is_logits;
  p.num_rows = p.num_outputs = x.size(0), p.vocab_size = x.size(1);
  if (indices) {
    const View list(*indices, "indices");
    check.rank(list, 1, 1);
    check.dtype(list, {DType::kInt32, DType::kInt64});
    check.same_device(list, x);
    p.num_outputs = list.size(0), p.wide_samples = list.dtype == DType::kInt64;
    p.indices = {list.data, list.stride(0), list.dtype};
    check_indices(check, list, p.indices, p.num_rows);
  }
  p.temperature = reals(check, temperature, temperature_value, "temperature", x, p.num_outputs, p.num_rows);
  p.top_k = integers(check, top_k, top_k_value, "top_k", x, p.num_outputs, p.num_rows);
  p.top_p = reals(check, top_p, top_p_value, "top_p", x, p.num_outputs, p.num_rows);
  p.min_p = reals(check, min_p, min_p_value, "min_p", x, p.num_outputs, p.num_rows);
  p.has_top_k = top_k || top_k_value >= 0, p.has_top_p = top_p || !(top_p_value >= 1);
  p.has_min_p = min_p || !(min_p_value <= 0), p.top_k_first = top_k_first;
  p.random = random_of(check, x, p.num_outputs, seed, seed_value, offset, offset_value, slot, slot_value);
  const OnDevice where(x);
  if (p.filters()) check_length(check, x, false, where);
  Tensor samples =
      empty(&p.num_outputs, 1, input, p.wide_samples ? aoti_torch_dtype_int64() : aoti_torch_dtype_int32());
  Tensor valid = empty(&p.num_outputs, 1, input, aoti_torch_dtype_bool());
  p.samples = View(samples, "samples").data, p.valid = static_cast<bool*>(View(valid, "valid").data);
  if (p.num_outputs > 0) sample_rows(p, where);
  return {std::move(samples), std::move(valid)};
}

Tensor mapped(const Check& check, const Tensor& input, const char* name, RowMap map, const Maybe& list, double real,
              int64_t integer, const char* number, std::optional<bool> enable_pdl = {}) {
  const View x(input, name);
  MapRowsParams p{};
  p.map = map, p.input = rows_of(check, x, 2), p.num_rows = x.size(0), p.vocab_size = x.size(1);
  p.parameter = map == RowMap::kTopKRenorm || map == RowMap::kTopKMask
                    ? integers(check, list, integer, number, x, p.num_rows, p.num_rows)
                    : reals(check, list, real, number, x, p.num_rows, p.num_rows);
  const OnDevice where(x, enable_pdl);
  check_length(check, x, false, where);
  Tensor output = map == RowMap::kSoftmax ? empty(x.sizes, 2, input, aoti_torch_dtype_float32()) : empty_like(x, input);
  p.output = View(output, "output").data;
  if (p.num_rows > 0) map_rows(p, where);
  return output;
}

Tensor softmax(const Tensor& logits, const Maybe& temperature, double temperature_value,
               std::optional<bool> enable_pdl) {
  return mapped(Check("softmax"), logits, "logits", RowMap::kSoftmax, temperature, temperature_value, 0, "temperature",
                enable_pdl);
}

Tensor top_k_renorm_probs(const Tensor& probs, const Maybe& top_k, int64_t top_k_value) {
  return mapped(Check("top_k_renorm_probs"), probs, "probs", RowMap::kTopKRenorm, top_k, 0, top_k_value, "top_k");
}

Tensor top_p_renorm_probs(const Tensor& probs, const Maybe& top_p, double top_p_value) {
  return mapped(Check("top_p_renorm_probs"), probs, "probs", RowMap::kTopPRenorm, top_p, top_p_value, 0, "top_p");
}

Tensor top_k_mask_logits(const Tensor& logits, const Maybe& top_k, int64_t top_k_value) {
  return mapped(Check("top_k_mask_logits"), logits, "logits", RowMap::kTopKMask, top_k, 0, top_k_value, "top_k");
}

Tensor chain_speculative_sampling(const Tensor& draft_probs, const Tensor& draft_token_ids, const Tensor& target_probs,
                                  const Tensor& accepted, const Tensor& emitted, const Maybe& seed, int64_t seed_value,
                                  const Maybe& offset, int64_t offset_value, const Maybe& slot, int64_t slot_value) {
  const Check check("chain_speculative_sampling");
  const View draft(draft_probs, "draft_probs"), ids(draft_token_ids, "draft_token_ids");
  const View target(target_probs, "target_probs"), a(accepted, "maybe_output_accepted_token_num");
  const View e(emitted, "maybe_output_emitted_draft_token_num");
  ChainParams p{};
  p.draft = rows_of(check, draft, 3), p.target = rows_of(check, target, 3);
  p.batch_size = draft.size(0), p.num_draft = draft.size(1), p.vocab_size = draft.size(2);
  check.same_dtype(target, draft);
  check.shape(target, {p.batch_size, p.num_draft + 1, p.vocab_size});
  check.shape(ids, {p.batch_size, p.num_draft});
  check.dtype(ids, {DType::kInt32, DType::kInt64});
  check.last_contiguous(ids);
  for (const View* list : {&a, &e}) {
    check.shape(*list, {p.batch_size});
    check.dtype(*list, {DType::kInt32, DType::kInt64});
    check.contiguous(*list);
    check.writable(*list);
  }
  for (const View* arg : {&target, &ids, &a, &e}) check.same_device(*arg, draft);
  check.no_overlap(a, e, false);
  p.draft_batch_stride = draft.stride(0), p.target_batch_stride = target.stride(0);
  p.draft_ids = {ids.data, ids.stride(0), ids.dtype};
  p.random = random_of(check, draft, p.batch_size, seed, seed_value, offset, offset_value, slot, slot_value);
  p.accepted = a.data, p.emitted = e.data;
  p.wide_accepted = a.dtype == DType::kInt64, p.wide_emitted = e.dtype == DType::kInt64;
  const OnDevice where(draft);
  check_length(check, draft, true, where);
  const int64_t shape[2] = {p.batch_size, p.num_draft + 1};
  Tensor tokens = empty(shape, 2, draft_probs, aoti_torch_dtype_int32());
  p.tokens = static_cast<int32_t*>(View(tokens, "tokens").data);
  if (p.batch_size > 0) chain_sample(p, where);
  return tokens;
}

std::tuple<Tensor, Tensor> top_k(const Tensor& input, int64_t k) {
  const Check check("top_k");
  const View x(input, "input");
  TopKParams p{};
  p.input = rows_of(check, x, 2), p.num_rows = x.size(0), p.vocab_size = x.size(1), p.k = k;
  if (k < 1 || k > p.vocab_size)
    check.fail("k", "got " + std::to_string(k) + ", wanted 1 to " + std::to_string(p.vocab_size));
  const OnDevice where(x);
  check_length(check, x, false, where);
  const int64_t shape[2] = {p.num_rows, k};
  Tensor values = empty(shape, 2, input), indices = empty(shape, 2, input, aoti_torch_dtype_int64());
  p.values = View(values, "values").data, p.indices = static_cast<int64_t*>(View(indices, "indices").data);
  if (p.num_rows > 0) top_k_rows(p, where);
  return {std::move(values), std::move(indices)};
}

FLASHINFER_LIBRARY(m) {
  m.impl("sample_from_rows", box<sample_from_rows>);
  m.impl("softmax", box<softmax>);
  m.impl("top_k_renorm_probs", box<top_k_renorm_probs>);
  m.impl("top_p_renorm_probs", box<top_p_renorm_probs>);
  m.impl("top_k_mask_logits", box<top_k_mask_logits>);
  m.impl("chain_speculative_sampling", box<chain_speculative_sampling>);
  m.impl("top_k", box<top_k>);
}

}  // namespace
}  // namespace flashinfer::binding
