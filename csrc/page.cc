// Operators of the page family.
#include "binding/binding.h"

#include <tuple>

#include <flashinfer/common/page.h>

namespace flashinfer::binding {
namespace {

// A tensor whose elements move as bytes. torch's own type number distinguishes types that DType does not
// have.
struct Moved {
  View view;
  int32_t type;

  Moved(const Check& check, const Tensor& tensor, const char* name) : view(tensor, name) {
    require(aoti_torch_get_dtype(tensor.get(), &type), "the dtype");
    const int64_t width = aoti_torch_dtype_element_size(type);
    if (width == size_of(view.dtype) && width <= 4 && view.dtype != DType::kInt16) return;
    check.fail(
        name,
        "got a dtype of " + std::to_string(width) + " bytes, wanted float32, float16, bfloat16, int32 or one of 1 byte",
        "TypeError");
  }
};

void same_type(const Check& check, const Moved& arg, const Moved& like) {
  check.same_dtype(arg.view, like.view);
  if (arg.type != like.type)
    check.fail(arg.view.name, std::string("got another dtype than ") + like.view.name + " has", "TypeError");
}

void index(const Check& check, const View& arg, const View& like, int64_t size) {
  check.dtype(arg, {DType::kInt32});
  check.shape(arg, {size});
  check.same_device(arg, like);
  check.contiguous(arg);
  check.aligned(arg);
}

// Numbers beyond int32 are useless with int32 indices, and their products would overflow.
void check_range(const Check& check, const char* name, int64_t got, int64_t least) {
  if (got >= least && got <= INT32_MAX) return;
  check.fail(name,
             "got " + std::to_string(got) + ", wanted " + std::to_string(least) + " to " + std::to_string(INT32_MAX));
}

const int32_t* ints(const View& arg) { return static_cast<const int32_t*>(arg.data); }

// Dimensions of a cache by meaning; -1 if absent.
struct Axes {
  int64_t page, slot, head;
};

PagedStream stream(const View& tokens, const View& cache, Axes axes, int64_t offset) {
  const int64_t width = size_of(tokens.dtype);
  PagedStream s{.tokens = static_cast<const char*>(tokens.data),
                .cache = static_cast<char*>(cache.data) + offset * width,
                .token_stride = tokens.stride(0) * width,
                .token_head_stride = axes.head < 0 ? 0 : tokens.stride(1) * width,
                .page_stride = cache.stride(axes.page) * width,
                .slot_stride = cache.stride(axes.slot) * width,
                .head_stride = axes.head < 0 ? 0 : cache.stride(axes.head) * width,
                .num_heads = axes.head < 0 ? 1 : tokens.size(1),
                .row_bytes = tokens.size(-1) * width};
  const bool dense = s.token_head_stride == s.row_bytes && s.head_stride == s.row_bytes;
  if (s.num_heads == 1 || dense) s.row_bytes *= s.num_heads, s.num_heads = 1, s.token_head_stride = s.head_stride = 0;
  return s;
}

// Check the indices, and the properties that tokens and caches of any rank share.
AppendParams append_params(const Check& check, const char* op, const View* const (&tokens)[2],
                           std::initializer_list<const View*> caches, int64_t num_pages, int64_t page_size,
                           const View& batch_indices, const View& positions, const View& kv_indices,
                           const View& kv_indptr, const View& kv_last_page_len) {
  const View& first = *tokens[0];
  const int64_t num_tokens = first.size(0);
  check.rank(kv_indptr, 1, 1);
  if (kv_indptr.size(0) < 1) check.fail(kv_indptr, "got shape [0], wanted [batch_size + 1]");
  index(check, batch_indices, first, num_tokens);
  index(check, positions, first, num_tokens);
  index(check, kv_indices, first, -1);
  index(check, kv_indptr, first, -1);
  index(check, kv_last_page_len, first, kv_indptr.size(0) - 1);
  for (const View* arg : tokens) check.same_device(*arg, first), check.last_contiguous(*arg), check.aligned(*arg);
  for (const View* cache : caches) {
    check.same_device(*cache, first);
    check.last_contiguous(*cache);
    check.writable(*cache);
    for (const View* arg : {tokens[0], tokens[1], &batch_indices, &positions, &kv_indices, &kv_indptr})
      check.no_overlap(*cache, *arg, false);
  }
  if (page_size < 1 || page_size > INT32_MAX)
    check.fail(**caches.begin(), "got page_size " + std::to_string(page_size) + ", wanted 1 or more");
  return {{.batch_indices = ints(batch_indices),
           .positions = ints(positions),
           .kv_indices = ints(kv_indices),
           .kv_indptr = ints(kv_indptr),
           .num_tokens = num_tokens,
           .num_indices = kv_indices.size(0),
           .num_pages = num_pages,
           .batch_size = kv_indptr.size(0) - 1,
           .page_size = static_cast<int32_t>(page_size),
           .op = op},
          {}};
}

void append_paged_kv_cache(const Tensor& append_key, const Tensor& append_value, const Tensor& batch_indices,
                           const Tensor& positions, const Tensor& paged_kv_cache,
                           const std::optional<Tensor>& paged_v_cache, const Tensor& kv_indices,
                           const Tensor& kv_indptr, const Tensor& kv_last_page_len, bool heads_first) {
  constexpr const char* kOp = "append_paged_kv_cache";
  const Check check(kOp);
  const bool separate = paged_v_cache.has_value();
  const Moved key(check, append_key, "append_key"), value(check, append_value, "append_value");
  const Moved k(check, paged_kv_cache, separate ? "paged_kv_cache[0]" : "paged_kv_cache");
  const Moved v(check, separate ? *paged_v_cache : paged_kv_cache, separate ? "paged_kv_cache[1]" : "paged_kv_cache");
  for (const Moved* arg : {&value, &k, &v}) same_type(check, *arg, key);
  check.rank(key.view, 3, 3);
  const int64_t heads = key.view.size(1), dim = key.view.size(2);
  check.shape(value.view, {key.view.size(0), heads, separate ? -1 : dim});
  check.rank(k.view, separate ? 4 : 5, separate ? 4 : 5);
  check.rank(v.view, separate ? 4 : 5, separate ? 4 : 5);
  const int64_t rest = separate ? 1 : 2;  // the first dimension after the pages and the pair of K and V
  const Axes axes{.page = 0, .slot = heads_first ? rest + 1 : rest, .head = heads_first ? rest : rest + 1};
  const int64_t pages = k.view.size(0), page_size = k.view.size(axes.slot);
  const int64_t at_rest = heads_first ? heads : page_size, behind = heads_first ? page_size : heads;
  if (separate) {
    check.shape(k.view, {pages, at_rest, behind, dim});
    check.shape(v.view, {pages, at_rest, behind, value.view.size(2)});
    check.no_overlap(k.view, v.view, false);
  } else {
    check.shape(k.view, {pages, 2, at_rest, behind, dim});
  }
  AppendParams params =
      append_params(check, kOp, {&key.view, &value.view}, {&k.view, &v.view}, pages, page_size,
                    View(batch_indices, "batch_indices"), View(positions, "positions"), View(kv_indices, "kv_indices"),
                    View(kv_indptr, "kv_indptr"), View(kv_last_page_len, "kv_last_page_len"));
  params.streams[0] = stream(key.view, k.view, axes, 0);
  params.streams[1] = stream(value.view, v.view, axes, separate ? 0 : v.view.stride(1));
  append_paged(params, OnDevice(key.view));
}

void append_paged_mla_kv_cache(const Tensor& append_ckv, const Tensor& append_kpe, const Tensor& batch_indices,
                               const Tensor& positions, const Tensor& ckv_cache, const Tensor& kpe_cache,
                               const Tensor& kv_indices, const Tensor& kv_indptr, const Tensor& kv_last_page_len) {
  constexpr const char* kOp = "append_paged_mla_kv_cache";
  const Check check(kOp);
  const Moved ckv(check, append_ckv, "append_ckv"), kpe(check, append_kpe, "append_kpe");
  const Moved to_ckv(check, ckv_cache, "ckv_cache"), to_kpe(check, kpe_cache, "kpe_cache");
  for (const Moved* arg : {&kpe, &to_ckv, &to_kpe}) same_type(check, *arg, ckv);
  check.rank(ckv.view, 2, 2);
  check.shape(kpe.view, {ckv.view.size(0), -1});
  check.shape(to_ckv.view, {-1, -1, ckv.view.size(1)});
  const int64_t pages = to_ckv.view.size(0), page_size = to_ckv.view.size(1);
  check.shape(to_kpe.view, {pages, page_size, kpe.view.size(1)});
  check.no_overlap(to_ckv.view, to_kpe.view, false);
  AppendParams params =
      append_params(check, kOp, {&ckv.view, &kpe.view}, {&to_ckv.view, &to_kpe.view}, pages, page_size,
                    View(batch_indices, "batch_indices"), View(positions, "positions"), View(kv_indices, "kv_indices"),
                    View(kv_indptr, "kv_indptr"), View(kv_last_page_len, "kv_last_page_len"));
  const Axes axes{.page = 0, .slot = 1, .head = -1};
  params.streams[0] = stream(ckv.view, to_ckv.view, axes, 0);
  params.streams[1] = stream(kpe.view, to_kpe.view, axes, 0);
  append_paged(params, OnDevice(ckv.view));
}

void write_positions(const Check& check, const Tensor& append_indptr, const Tensor& seq_lens, int64_t nnz,
                     const View& batch_indices, const View& positions, bool padded) {
  const View indptr(append_indptr, "append_indptr"), lens(seq_lens, "seq_lens");
  check.rank(lens, 1, 1);
  index(check, lens, indptr, -1);
  index(check, indptr, lens, lens.size(0) + 1);
  for (const View* out : {&batch_indices, &positions}) {
    index(check, *out, indptr, nnz);
    check.writable(*out);
    for (const View* arg : {&indptr, &lens}) check.no_overlap(*out, *arg, false);
  }
  check.no_overlap(batch_indices, positions, false);
  const PositionsParams params{.append_indptr = ints(indptr),
                               .seq_lens = ints(lens),
                               .batch_indices = static_cast<int32_t*>(batch_indices.data),
                               .positions = static_cast<int32_t*>(positions.data),
                               .num_tokens = nnz,
                               .batch_size = lens.size(0),
                               .padded = padded};
  flashinfer::batch_indices_positions(params, OnDevice(indptr));
}

std::tuple<Tensor, Tensor> get_batch_indices_positions(const Tensor& append_indptr, const Tensor& seq_lens,
                                                       int64_t nnz) {
  const Check check("get_batch_indices_positions");
  check.dtype(View(append_indptr, "append_indptr"), {DType::kInt32});
  check_range(check, "nnz", nnz, 0);
  Tensor batch_indices = empty(&nnz, 1, append_indptr), positions = empty(&nnz, 1, append_indptr);
  write_positions(check, append_indptr, seq_lens, nnz, View(batch_indices, "batch_indices"),
                  View(positions, "positions"), false);
  return {std::move(batch_indices), std::move(positions)};
}

void get_batch_indices_positions_out(const Tensor& append_indptr, const Tensor& seq_lens, const Tensor& batch_indices,
                                     const Tensor& positions) {
  const View out(batch_indices, "batch_indices");
  const Check check("get_batch_indices_positions");
  check.rank(out, 1, 1);
  write_positions(check, append_indptr, seq_lens, out.size(0), out, View(positions, "positions"), true);
}

void block_sparse_indices_to_vector_sparse_offsets(const Tensor& block_sparse_indices,
                                                   const Tensor& block_sparse_indptr,
                                                   const Tensor& vector_sparse_offsets,
                                                   const Tensor& vector_sparse_indptr, const Tensor& kv_lens,
                                                   int64_t stride_block, int64_t stride_n, int64_t block_size) {
  const Check check("block_sparse_indices_to_vector_sparse_offsets");
  const View indices(block_sparse_indices, "block_sparse_indices"), indptr(block_sparse_indptr, "block_sparse_indptr");
  const View offsets(vector_sparse_offsets, "vector_sparse_offsets"),
      starts(vector_sparse_indptr, "vector_sparse_indptr");
  const View lens(kv_lens, "kv_lens");
  check.rank(lens, 1, 1);
  for (const View* arg : {&indices, &offsets, &lens}) index(check, *arg, indices, -1);
  for (const View* arg : {&indptr, &starts}) index(check, *arg, indices, lens.size(0) + 1);
  check.writable(offsets);
  for (const View* arg : {&indices, &indptr, &starts, &lens}) check.no_overlap(offsets, *arg, false);
  check_range(check, "block_size", block_size, 1);
  check_range(check, "stride_block", stride_block, INT32_MIN);
  check_range(check, "stride_n", stride_n, INT32_MIN);
  const BlockOffsetsParams params{.block_indices = ints(indices),
                                  .block_indptr = ints(indptr),
                                  .indptr = ints(starts),
                                  .kv_lens = ints(lens),
                                  .offsets = static_cast<int32_t*>(offsets.data),
                                  .num_indices = indices.size(0),
                                  .num_offsets = offsets.size(0),
                                  .batch_size = lens.size(0),
                                  .stride_block = stride_block,
                                  .stride_n = stride_n,
                                  .block_size = block_size};
  flashinfer::block_offsets(params, OnDevice(indices));
}

FLASHINFER_LIBRARY(m) {
  m.impl("append_paged_kv_cache", box<append_paged_kv_cache>);
  m.impl("append_paged_mla_kv_cache", box<append_paged_mla_kv_cache>);
  m.impl("get_batch_indices_positions", box<get_batch_indices_positions>);
  m.impl("get_batch_indices_positions_out", box<get_batch_indices_positions_out>);
  m.impl("block_sparse_indices_to_vector_sparse_offsets", box<block_sparse_indices_to_vector_sparse_offsets>);
}

}  // namespace
}  // namespace flashinfer::binding
