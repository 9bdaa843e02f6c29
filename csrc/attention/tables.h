// Arguments of the operators that make plans: numbers that plans of one kind share, and the tables of a batch
// on the host.
//
// One call checks the tables, computes the lengths of keys and schedules the batch.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "attention/lists.h"
#include "binding/arguments.h"

namespace flashinfer::binding {

// Elements of one int64 tensor: torch takes as long to pass one number as to pass one tensor. PlanNumbers in
// flashinfer/_attention/signature.py has the same list. If page_size is 0, keys are ragged. If with_tables is
// not 0, kv_indptr and the used kv_indices follow the lists.
#define FLASHINFER_PLAN_NUMBERS(X) \
  X(num_qo_heads)                  \
  X(num_kv_heads)                  \
  X(head_dim_qk)                   \
  X(head_dim_vo)                   \
  X(dtype_q)                       \
  X(dtype_kv)                      \
  X(dtype_o)                       \
  X(mask_mode)                     \
  X(window_left)                   \
  X(device)                        \
  X(max_items)                     \
  X(max_merges)                    \
  X(tile_rows)                     \
  X(split)                         \
  X(kv_chunk)                      \
  X(variant)                       \
  X(page_size)                     \
  X(with_tables)

struct PlanNumbers {
#define FLASHINFER_NUMBER_(name) int64_t name;
  FLASHINFER_PLAN_NUMBERS(FLASHINFER_NUMBER_)
#undef FLASHINFER_NUMBER_

  static PlanNumbers of(const Check& check, const View& given) {
    constexpr int64_t kCount = sizeof(PlanNumbers) / sizeof(int64_t);
    check.dtype(given, {DType::kInt64});
    check.shape(given, {kCount});
    check.contiguous(given);
    if (given.device_type != aoti_torch_device_type_cpu())
      check.fail(given, "got a tensor of a device, wanted one on the CPU");
    PlanNumbers numbers;
    std::memcpy(&numbers, given.data, sizeof(numbers));
    return numbers;
  }
};

#define FLASHINFER_PLAN_TABLES(X) \
  X(Written<'a'>, buffer)         \
  X(Tensor, numbers)              \
  X(OptionalTensor, qo_indptr)    \
  X(OptionalTensor, kv_lens)      \
  X(OptionalTensor, kv_indptr)    \
  X(OptionalTensor, kv_indices)   \
  X(OptionalTensor, last_page_len)
FLASHINFER_ARGUMENTS(PlanArguments, FLASHINFER_PLAN_TABLES)

// References to the tables of an operator that also has other arguments.
struct PlanTables {
  const Tensor& buffer;
  const OptionalTensor &qo_indptr, &kv_lens, &kv_indptr, &kv_indices, &last_page_len;

  PlanTables(const Tensor& to, const OptionalTensor& queries, const OptionalTensor& lens, const OptionalTensor& offsets,
             const OptionalTensor& pages, const OptionalTensor& last)
      : buffer(to), qo_indptr(queries), kv_lens(lens), kv_indptr(offsets), kv_indices(pages), last_page_len(last) {}
  explicit PlanTables(const PlanArguments& given)
      : PlanTables(given.buffer, given.qo_indptr, given.kv_lens, given.kv_indptr, given.kv_indices,
                   given.last_page_len) {}
};

// A table on the host. `data` is null if the argument is None.
struct HostTable {
  const int32_t* data = nullptr;
  int64_t size = 0;

  HostTable(const Check& check, const OptionalTensor& tensor, const char* name) {
    if (!tensor) return;
    static constexpr int32_t kNothing = 0;  // an empty tensor has no data
    const View view(*tensor, name);
    check.rank(view, 1, 1);
    size = view.size(0);
    data = host_int32s(check, view, size);
    if (data == nullptr) data = &kNothing;
  }

  explicit operator bool() const { return data != nullptr; }
  int32_t operator[](int64_t i) const { return data[i]; }

  // Return whether these are the offsets of `count` requests: not negative, and never decreasing.
  bool are_offsets(int64_t count) const {
    if (size != count + 1 || data[0] < 0) return false;
    bool rising = true;
    for (int64_t i = 0; i < count; ++i) rising &= data[i] <= data[i + 1];
    return rising;
  }
};

// Lengths of keys of a batch. If the tables do not fit each other, `valid` is false and the other members are
// undefined. The caller then looks for the error in Python.
//
// Without kv_indptr, lengths are kv_lens. With it, they are differences of offsets if keys are ragged
// (page_size 0). For pages they follow from last_page_len, or are kv_lens, which must fit into the pages.
struct BatchLengths {
  bool valid = false;
  int64_t batch_size = 0;
  std::vector<int32_t> lens;
  int32_t num_queries = 0, first_query = 0;  // end and start of the requests' queries in q
  int32_t kv_size = 0;                       // one more than the largest page of kv_indices, or the end of ragged keys
  int32_t kv_start = 0, kv_end = 0;          // the first and the last offset of keys

  BatchLengths(const Check& check, const PlanTables& given, int64_t page_size) {
    const HostTable queries(check, given.qo_indptr, "qo_indptr"), lengths(check, given.kv_lens, "kv_lens");
    const HostTable offsets(check, given.kv_indptr, "kv_indptr"), pages(check, given.kv_indices, "kv_indices");
    const HostTable last(check, given.last_page_len, "last_page_len");
    if (!offsets && !lengths) check.fail("kv_lens", "got none, wanted lengths or kv_indptr");
    batch_size = offsets ? offsets.size - 1 : lengths.size;
    if (batch_size > INT32_MAX / 64) check.fail("kv_lens", "got too many requests");
    if (batch_size < 0 || (queries && !queries.are_offsets(batch_size))) return;
    num_queries = queries ? queries[batch_size] : static_cast<int32_t>(batch_size);
    first_query = queries ? queries[0] : 0;
    lens.resize(batch_size);
    valid = offsets ? read_offsets(offsets, lengths, last, page_size) && read_pages(pages) : read_lengths(lengths);
  }

 private:
  bool read_lengths(const HostTable& lengths) {
    bool fits = true;
    for (int64_t b = 0; b < batch_size; ++b) lens[b] = lengths[b], fits &= lengths[b] >= 0;
    return fits;
  }

  bool read_offsets(const HostTable& offsets, const HostTable& lengths, const HostTable& last, int64_t page_size) {
    if (!offsets.are_offsets(batch_size)) return false;
    kv_start = offsets[0], kv_end = offsets[batch_size];
    if (page_size == 0) {
      for (int64_t b = 0; b < batch_size; ++b) lens[b] = offsets[b + 1] - offsets[b];
      kv_size = kv_end;
      return true;
    }
    const HostTable& given = last ? last : lengths;
    if (!given || given.size != batch_size) return false;
    bool fits = true;
    for (int64_t b = 0; b < batch_size; ++b) {
      const int64_t pages = int64_t{offsets[b + 1]} - offsets[b], room = pages * page_size;
      const int64_t length = !last ? given[b] : pages == 0 ? 0 : room - page_size + given[b];
      fits &= length >= 0 && length <= room && (!last || room <= INT32_MAX);
      fits &= !last || pages == 0 || given[b] >= 1;
      lens[b] = static_cast<int32_t>(length);
    }
    return fits;
  }

  bool read_pages(const HostTable& pages) {
    if (!pages) return true;
    if (pages.size < kv_end) return false;
    // Four at a time: bindings are compiled with -O1, which does not vectorise. 8,192 pages take 1.8 us, else
    // 6.9.
    typedef int32_t Four __attribute__((vector_size(16)));
    Four max_of{-1, -1, -1, -1}, bits_of{};
    int64_t i = kv_start;
    for (; i + 4 <= kv_end; i += 4) {
      Four some;
      std::memcpy(&some, pages.data + i, sizeof(some));
      max_of = some > max_of ? some : max_of;
      bits_of |= some;
    }
    int32_t max_page = -1, bits = 0;  // `bits` is negative if any page is
    for (int lane = 0; lane < 4; ++lane) max_page = std::max(max_page, max_of[lane]), bits |= bits_of[lane];
    for (; i < kv_end; ++i) max_page = std::max(max_page, pages[i]), bits |= pages[i];
    if (bits < 0 || max_page == std::numeric_limits<int32_t>::max()) return false;
    kv_size = max_page + 1;
    return true;
  }
};

// Return the request of a schedule, without the limits of the kernels.
inline PlanRequest plan_request(const Check& check, const PlanTables& given, const PlanNumbers& numbers,
                                const BatchLengths& batch) {
  PlanRequest request{};
  request.batch_size = static_cast<int32_t>(batch.batch_size), request.kv_lens = batch.lens.data();
  if (given.qo_indptr)
    request.qo_indptr = host_int32s(check, View(*given.qo_indptr, "qo_indptr"), batch.batch_size + 1);
  if (numbers.num_kv_heads < 1 || numbers.num_qo_heads < 1 || numbers.num_qo_heads % numbers.num_kv_heads != 0)
    check.fail("num_qo_heads", "got " + std::to_string(numbers.num_qo_heads) + ", wanted a multiple of num_kv_heads, " +
                                   std::to_string(numbers.num_kv_heads));
  request.num_kv_heads = check.int32("num_kv_heads", numbers.num_kv_heads);
  request.group = check.int32("num_qo_heads", numbers.num_qo_heads / numbers.num_kv_heads);
  if (numbers.mask_mode < 0 || numbers.mask_mode > 3)
    check.fail("mask_mode", "got " + std::to_string(numbers.mask_mode) + ", wanted 0 to 3");
  request.mask_mode = static_cast<MaskMode>(numbers.mask_mode);
  request.window_left = check.int32("window_left", numbers.window_left);
  request.split = numbers.split != 0;
  request.kv_chunk = check.int32("kv_chunk", numbers.kv_chunk);
  return request;
}

// Append kv_indptr and the used part of kv_indices to the lists, so one copy moves all tables to the device.
// Write nothing if they do not fit: the caller computes the same size and allocates a larger buffer.
inline void append_tables(const Check& check, const View& buffer, const PlanTables& given, const BatchLengths& batch) {
  const HostTable offsets(check, given.kv_indptr, "kv_indptr"), pages(check, given.kv_indices, "kv_indices");
  int32_t* data = plan_header(check, buffer);
  const int64_t used = pages ? batch.kv_end : 0, at = aligned_offset(data[kNeeded]);
  const int64_t pages_at = aligned_offset(at + offsets.size);
  if (buffer.numel < pages_at + used) return;
  std::copy_n(offsets.data, offsets.size, data + at);
  if (pages) std::copy_n(pages.data, used, data + pages_at);
}

// Write the plan of a batch. `limits(request, mean rows of a request)` returns the WorkLimits of the kernels.
template <typename Limits>
void plan_batch(const Check& check, const PlanTables& given, const PlanNumbers& numbers, Limits&& limits) {
  const BatchLengths batch(check, given, numbers.page_size);
  const View buffer(given.buffer, "buffer");
  int32_t* header = plan_header(check, buffer);
  std::fill(header, header + kPlanHeader, 0);
  if (!batch.valid) return;
  PlanRequest request = plan_request(check, given, numbers, batch);
  const int64_t rows = rows_of_requests(check, request), batch_size = request.batch_size;
  const WorkLimits tiles = limits(request, batch_size > 0 ? (rows + batch_size - 1) / batch_size : 0);
  request.tile_rows = tiles.tile_rows, request.concurrency = tiles.concurrency;
  request.min_chunk = tiles.min_chunk, request.kv_step = tiles.kv_step;
  request.item_keys = tiles.item_keys, request.merge_keys = tiles.merge_keys;
  request.whole_keys = tiles.whole_keys;
  // A captured graph also needs room for rows before the first request: a later plan may use them.
  const int64_t most_rows = int64_t{batch.num_queries} * request.group;
  if (most_rows > INT32_MAX) check.fail("qo_indptr", "got more than 2147483647 rows");
  header[kValid] = 1, header[kNumQueries] = batch.num_queries, header[kFirstQuery] = batch.first_query;
  header[kKvSize] = batch.kv_size, header[kKvStart] = batch.kv_start, header[kKvEnd] = batch.kv_end;
  write_lists(check, buffer, request, most_rows, numbers.max_items, numbers.max_merges);
  if (numbers.with_tables) append_tables(check, buffer, given, batch);
}

}  // namespace flashinfer::binding
