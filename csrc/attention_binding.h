// What the bindings of decode and prefill share: a module's two operators, run() and plan(), in a namespace of its own.
//
// run() computes attention of all requests, by a plan, or of one request without. plan() fills a buffer on the host
// with the lists of a schedule; a copy of it on the device is what run() takes. Neither reads a tensor of a GPU.
#pragma once

#define FLASHINFER_BINDING 1
#include <flashinfer/attention/schedule.h>

#include "binding.h"

namespace flashinfer {

struct half_t;  // additional parameters may point to these; a binding never looks behind the pointer
struct bfloat16_t;

}  // namespace flashinfer

#include "attention_config.h"

namespace flashinfer::binding {

using OptionalTensor = std::optional<Tensor>;

// The plan's buffer, int32: a header, lengths of queries and keys, merges, items.
constexpr int64_t kPlanHeader = 16;
enum PlanField { kItems, kMerges, kTileRows, kSlotRows, kSlots, kMaxItems, kMaxMerges, kMaxSlots, kNeeded };

struct PlanLayout {
  int64_t qo_lens, kv_lens, merges, items, size;

  PlanLayout(int64_t batch_size, int64_t max_items, int64_t max_merges) {
    qo_lens = kPlanHeader, kv_lens = qo_lens + batch_size;
    merges = (kv_lens + batch_size + 7) / 8 * 8, items = merges + 8 * max_merges, size = items + 8 * max_items;
  }
};

inline MaskMode mask_mode_of(const Check& check, int64_t mode) {
  if (mode < 0 || mode > 3) check.fail("mask_mode", "got " + std::to_string(mode) + ", wanted 0 to 3");
  return static_cast<MaskMode>(mode);
}

// Copies by wide instructions: rows start at multiples of 16 bytes.
inline void wide_rows(const Check& check, const View& arg) {
#if FLASHINFER_CUDA
  bool fits = reinterpret_cast<uintptr_t>(arg.data) % 16 == 0;
  for (int64_t dim = 0; dim + 1 < arg.ndim; ++dim)
    fits = fits && (arg.sizes[dim] <= 1 || arg.strides[dim] * size_of(arg.dtype) % 16 == 0);
  if (!fits && arg.numel > 0)
    check.fail(arg, "got rows that do not start at multiples of 16 bytes, wanted .contiguous()");
#else
  check.aligned(arg);
#endif
}

// The dimensions of a cache or of ragged keys: [pages, page_size, heads, dim] with kv_layout NHD, [pages, heads,
// page_size, dim] with HND; without the first where ragged.
struct KvDims {
  int page, row, head;

  KvDims(bool paged, bool nhd) : page(0), row(paged + !nhd), head(paged + nhd) {}
};

struct RunArguments {
  View q, k, v, o;
  bool paged, nhd;
  KvDims dims;

  RunArguments(const Check& check, const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& o_,
               int64_t kv_layout)
      : q(q_, "q"), k(k_, "k"), v(v_, "v"), o(o_, "out"), paged(k.ndim == 4), nhd(kv_layout == 0), dims(paged, nhd) {
    if (kv_layout != 0 && kv_layout != 1) check.fail("kv_layout", "wanted NHD or HND");
    check.rank(q, 3, 3);
    check.rank(k, 3, 4);
    const int64_t rows = k.size(dims.row), heads = k.size(dims.head);
    if (heads < 1 || q.size(1) % heads != 0 || q.size(1) < 1)
      check.fail(q, "got " + std::to_string(q.size(1)) + " heads, wanted a multiple of the " + std::to_string(heads) +
                        " heads of k");
    if (k.size(-1) != q.size(2))
      check.fail(k,
                 "got head_dim " + std::to_string(k.size(-1)) + ", wanted " + std::to_string(q.size(2)) + " as q has");
    if (paged && nhd) check.shape(v, {k.size(0), rows, heads, -1});
    if (paged && !nhd) check.shape(v, {k.size(0), heads, rows, -1});
    if (!paged && nhd) check.shape(v, {rows, heads, -1});
    if (!paged && !nhd) check.shape(v, {heads, rows, -1});
    check.shape(o, {q.size(0), q.size(1), v.size(-1)});
    check.same_dtype(v, k);
    for (const View* arg : {&k, &v, &o}) check.same_device(*arg, q);
    for (const View* arg : {&q, &k, &v, &o}) check.last_contiguous(*arg), wide_rows(check, *arg);
    check.writable(o);
    for (const View* arg : {&q, &k, &v}) check.no_overlap(o, *arg, false);
    if (q.size(0) * q.size(1) > INT32_MAX) check.fail(q, "got more than 2147483647 rows");
  }

  AttentionConfig config(int64_t variant) const {
    return {q.dtype,
            k.dtype,
            o.dtype,
            static_cast<int32_t>(q.size(2)),
            static_cast<int32_t>(v.size(-1)),
            static_cast<int32_t>(variant)};
  }

  KvCache cache() const {
    return {.k = k.data,
            .v = v.data,
            .k_page = paged ? k.stride(0) : 0,
            .k_row = k.stride(dims.row),
            .k_head = k.stride(dims.head),
            .v_page = paged ? v.stride(0) : 0,
            .v_row = v.stride(dims.row),
            .v_head = v.stride(dims.head),
            .indices = nullptr,
            .indptr = nullptr,
            .page_size = FastDiv(paged ? static_cast<uint32_t>(k.size(dims.row) > 0 ? k.size(dims.row) : 1) : 1),
            .num_pages = paged ? k.size(0) : k.size(dims.row)};
  }
};

// The operators' arguments after the tensors of a plan, in the order of the schema.
#define FLASHINFER_ATTENTION_RUN                                                                                 \
  "run(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, Tensor? kv_indptr, Tensor? kv_indices, "   \
  "Tensor? plan, Tensor(c!)? float_workspace, int batch_size, int max_items, int max_merges, int max_slots, "    \
  "int tile_rows, int slot_rows, Tensor? custom_mask, Tensor? mask_indptr, Tensor? prefix_len, "                 \
  "Tensor? token_pos_in_items, int token_pos_in_items_len, Tensor? max_item_len, int kv_layout, int mask_mode, " \
  "int window_left, float o_scale, float rope_scale, float rope_theta, int variant" ADDITIONAL_SCHEMA ") -> ()"
#define FLASHINFER_ATTENTION_PLAN                                                                                    \
  "plan(Tensor(a!) buffer, Tensor? qo_indptr, Tensor kv_lens, int num_qo_heads, int num_kv_heads, int head_dim_qk, " \
  "int head_dim_vo, int dtype_q, int dtype_kv, int dtype_o, int mask_mode, int window_left, int device, "            \
  "int max_items, int max_merges, int tile_rows, bool split, int variant) -> ()"

// An operator's arguments, one after the other.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}

  template <typename T>
  T take() {
    return unboxed<T>(*next_++);
  }
  int32_t take_int32(const Check& check, const char* name) {
    const int64_t value = take<int64_t>();
    if (value < INT32_MIN || value > INT32_MAX) check.fail(name, "got " + std::to_string(value) + ", wanted an int32");
    return static_cast<int32_t>(value);
  }

 private:
  StableIValue* next_;
};

template <typename T>
constexpr DType kind_of() {
  if constexpr (std::is_same_v<T, float>) return DType::kFloat32;
  if constexpr (std::is_same_v<T, double>) return DType::kFloat64;
  if constexpr (std::is_same_v<T, int32_t>) return DType::kInt32;
  if constexpr (std::is_same_v<T, int64_t>) return DType::kInt64;
  if constexpr (std::is_same_v<T, uint8_t>) return DType::kUInt8;
  if constexpr (std::is_same_v<T, uint16_t>) return DType::kUInt16;
  if constexpr (std::is_same_v<T, uint32_t>) return DType::kUInt32;
  if constexpr (std::is_same_v<T, half_t>) return DType::kFloat16;
  if constexpr (std::is_same_v<T, bfloat16_t>) return DType::kBFloat16;
  return DType::kOther;
}

// A contiguous tensor of T on the device of `like`, or null where there is none.
template <typename T>
const T* data_of(const Check& check, const OptionalTensor& tensor, const char* name, const View& like,
                 int64_t at_least = 0) {
  if (!tensor) return nullptr;
  const View view(*tensor, name);
  check.dtype(view, {kind_of<T>()});
  check.contiguous(view);
  check.same_device(view, like);
  if (view.numel < at_least)
    check.fail(view, "got " + std::to_string(view.numel) + " elements, wanted at least " + std::to_string(at_least));
  return static_cast<const T*>(view.data);
}

template <typename T>
void take_tensor(const Check& check, Arguments& arguments, T*& member, const char* name, bool optional,
                 const View& like) {
  OptionalTensor tensor = optional ? arguments.take<OptionalTensor>() : OptionalTensor(arguments.take<Tensor>());
  member = const_cast<T*>(data_of<T>(check, tensor, name, like));  // what a variant does with its own is its business
}
inline void take_scalar(Arguments& arguments, float& member) { member = static_cast<float>(arguments.take<double>()); }
inline void take_scalar(Arguments& arguments, int64_t& member) { member = arguments.take<int64_t>(); }

// Points the parameters to the lists of a plan.
inline void use_plan(const Check& check, Params& params, const View& plan, int64_t batch_size) {
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
}

inline void use_partials(const Check& check, Params& params, const View& workspace, int64_t max_slots, int64_t dim) {
  const int64_t rows = max_slots * params.num_kv_heads * params.slot_rows, needed = 4 * rows * (dim + 1);
  const int64_t has = workspace.numel * size_of(workspace.dtype);
  check.contiguous(workspace);
  if (has < needed) check.fail(workspace, "got " + std::to_string(has) + " bytes, wanted " + std::to_string(needed));
  params.partial_o = static_cast<float*>(workspace.data), params.partial_lse = params.partial_o + rows * dim;
}

inline void run(StableIValue* stack, uint64_t, uint64_t) {
  const Check check(FLASHINFER_ATTENTION_NAME);
  Arguments arguments(stack);
  const Tensor q = arguments.take<Tensor>(), k = arguments.take<Tensor>(), v = arguments.take<Tensor>();
  const Tensor out = arguments.take<Tensor>();
  const OptionalTensor lse = arguments.take<OptionalTensor>(), kv_indptr = arguments.take<OptionalTensor>(),
                       kv_indices = arguments.take<OptionalTensor>(), plan = arguments.take<OptionalTensor>(),
                       workspace = arguments.take<OptionalTensor>();
  const int64_t batch_size = arguments.take<int64_t>();
  Params params{};
  params.max_items = arguments.take_int32(check, "max_items");
  params.max_merges = arguments.take_int32(check, "max_merges");
  const int64_t max_slots = arguments.take<int64_t>();
  params.tile_rows = arguments.take_int32(check, "tile_rows");
  params.slot_rows = arguments.take_int32(check, "slot_rows");
  const OptionalTensor custom_mask = arguments.take<OptionalTensor>(), mask_indptr = arguments.take<OptionalTensor>(),
                       prefix_len = arguments.take<OptionalTensor>(),
                       token_pos_in_items = arguments.take<OptionalTensor>();
  params.token_pos_in_items_len = arguments.take_int32(check, "token_pos_in_items_len");
  const OptionalTensor max_item_len = arguments.take<OptionalTensor>();
  const RunArguments run(check, q, k, v, out, arguments.take<int64_t>());
  params.mask_mode = mask_mode_of(check, arguments.take<int64_t>());
  params.window_left = arguments.take_int32(check, "window_left");
  params.o_scale = static_cast<float>(arguments.take<double>());
  params.rope_rcp_scale = 1.0 / arguments.take<double>();
  params.rope_rcp_theta = 1.0 / arguments.take<double>();
  const AttentionConfig config = run.config(arguments.take<int64_t>());
  require_covered(config);
#define FLASHINFER_TAKE(name, type, optional) take_tensor(check, arguments, params.name, #name, optional, run.q);
  ADDITIONAL_TENSORS(FLASHINFER_TAKE)
#undef FLASHINFER_TAKE
#define FLASHINFER_TAKE(name, type) take_scalar(arguments, params.name);
  ADDITIONAL_SCALARS(FLASHINFER_TAKE)
#undef FLASHINFER_TAKE

  params.q = run.q.data, params.q_row = run.q.stride(0), params.q_head = run.q.stride(1);
  params.o = run.o.data, params.o_row = run.o.stride(0), params.o_head = run.o.stride(1);
  params.num_qo_heads = static_cast<int32_t>(run.q.size(1));
  params.num_kv_heads = static_cast<int32_t>(run.k.size(run.dims.head));
  params.group = FastDiv(static_cast<uint32_t>(params.num_qo_heads / params.num_kv_heads));
  if (lse) {
    const View view(*lse, "lse");
    check.dtype(view, {DType::kFloat32});
    check.shape(view, {run.q.size(0), run.q.size(1)});
    check.contiguous(view);
    check.same_device(view, run.q);
    check.no_overlap(view, run.o, false);
    params.lse = static_cast<float*>(view.data);
  }
  params.kv = run.cache();
  params.kv.indices = data_of<int32_t>(check, kv_indices, "kv_indices", run.q);
  params.kv.indptr = data_of<int32_t>(check, kv_indptr, "kv_indptr", run.q, batch_size + 1);
  if (run.paged && (!params.kv.indptr || !kv_indices))
    check.fail("kv_indices", "got none, wanted the pages of a paged cache");
  if (run.paged && !params.kv.indices) {  // an empty tensor has no data: no request has a page
    static const int32_t nothing = 0;
    params.kv.indices = &nothing;
  }
  if (!run.paged && kv_indices) check.fail("kv_indices", "got pages, wanted none: k has no dimension of pages");
  const int64_t requests = plan ? batch_size : 1;
  AttentionParams& common = params;  // a variant may have parameters of its own of these two names
  common.custom_mask = data_of<uint8_t>(check, custom_mask, "custom_mask", run.q);
  common.mask_indptr = data_of<int32_t>(check, mask_indptr, "mask_indptr", run.q, requests + 1);
  const int64_t masks = mask_indptr && !plan ? View(*mask_indptr, "mask_indptr").numel - 1 : 1;
  if (mask_indptr && !plan) {
    if (params.num_kv_heads % masks != 0)
      check.fail("mask_indptr", "got " + std::to_string(masks) + " masks, wanted a divisor of the " +
                                    std::to_string(params.num_kv_heads) + " heads of k");
    common.heads_per_mask = static_cast<int32_t>(params.num_kv_heads / masks);
  }
  if (params.mask_mode == MaskMode::kCustom && !custom_mask)
    check.fail("custom_mask", "got none, wanted one for the custom mask mode");
  params.prefix_len = data_of<uint32_t>(check, prefix_len, "prefix_len", run.q, requests);
  params.token_pos_in_items = data_of<uint16_t>(check, token_pos_in_items, "token_pos_in_items", run.q,
                                                requests * params.token_pos_in_items_len);
  params.max_item_len = data_of<uint16_t>(check, max_item_len, "max_item_len", run.q, requests);
  if (params.mask_mode == MaskMode::kMultiItem && !(prefix_len && token_pos_in_items && max_item_len))
    check.fail("prefix_len", "got none, wanted prefix_len, token_pos_in_items and max_item_len for multi-item scoring");

  const OnDevice where(run.o);
  OptionalTensor temporary;
  if (plan) {
    const View lists(*plan, "plan");
    check.same_device(lists, run.q);
    use_plan(check, params, lists, batch_size);
    if (max_slots > 0) {
      if (!workspace) check.fail("float_workspace", "got none, wanted one for split keys");
      const View bytes(*workspace, "float_workspace");
      check.same_device(bytes, run.q);
      use_partials(check, params, bytes, max_slots, run.v.size(-1));
    }
  } else {
    if (run.paged) check.fail(run.k, "got a paged cache, wanted a plan with it");
    const int64_t kv_len = run.k.size(run.dims.row), group = params.group.divisor;
    if (kv_len > INT32_MAX || run.q.size(0) * group > INT32_MAX) check.fail(run.k, "got more than 2147483647 rows");
    if (params.mask_mode == MaskMode::kCustom &&
        View(*custom_mask, "custom_mask").numel < (run.q.size(0) * kv_len + 7) / 8 * masks)
      check.fail("custom_mask", "got fewer bits than queries times keys");
    if (params.mask_mode == MaskMode::kMultiItem &&
        params.token_pos_in_items_len < static_cast<int64_t>(run.q.size(0)) - static_cast<int64_t>(kv_len))
      check.fail("token_pos_in_items_len", "is too small");
    const WorkLimits limits = attention_limits(config, run.q.size(0) * group, 0, run.q.device);
    const int32_t qo_indptr[] = {0, static_cast<int32_t>(run.q.size(0))}, kv_lens[] = {static_cast<int32_t>(kv_len)};
    params.single = plan_single({.batch_size = 1,
                                 .qo_indptr = qo_indptr,
                                 .kv_lens = kv_lens,
                                 .num_kv_heads = params.num_kv_heads,
                                 .group = static_cast<int32_t>(group),
                                 .mask_mode = params.mask_mode,
                                 .window_left = params.window_left,
                                 .tile_rows = limits.tile_rows,
                                 .places = limits.places,
                                 .min_chunk = limits.min_chunk,
                                 .kv_step = limits.kv_step,
                                 .split = true});
    params.tile_rows = limits.tile_rows;
    const int64_t rows = run.q.size(0) * group;
    params.slot_rows = static_cast<int32_t>(rows < limits.tile_rows ? rows : limits.tile_rows);
    if (params.single.num_chunks > 1) {
      const int64_t slots = static_cast<int64_t>(params.single.num_tiles) * params.single.num_chunks;
      const int64_t bytes[] = {4 * slots * params.num_kv_heads * params.slot_rows * (run.v.size(-1) + 1)};
      temporary.emplace(empty_bytes(bytes[0], q));
      use_partials(check, params, View(*temporary, "float_workspace"), slots, run.v.size(-1));
    }
  }
  if (run.o.numel > 0) attention(params, config, where);
}

// A view of int32 numbers on the host.
inline const int32_t* host_int32s(const Check& check, const View& arg, int64_t count) {
  check.dtype(arg, {DType::kInt32});
  check.shape(arg, {count});
  check.contiguous(arg);
  if (arg.device_type != aoti_torch_device_type_cpu())
    check.fail(arg, "got a tensor of a device, wanted one on the CPU");
  return static_cast<const int32_t*>(arg.data);
}

inline void make_plan(StableIValue* stack, uint64_t, uint64_t) {
  const Check check("plan");
  Arguments arguments(stack);
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

// plan() is registered for every device: its tensors are on the host whatever the module is for.
#define FLASHINFER_ATTENTION_LIBRARY FLASHINFER_ATTENTION_LIBRARY_(FLASHINFER_MODULE, FLASHINFER_DISPATCH_KEY)
#define FLASHINFER_ATTENTION_LIBRARY_(ns, key) FLASHINFER_ATTENTION_LIBRARY__(ns, key)
#define FLASHINFER_ATTENTION_LIBRARY__(ns, key)                                      \
  STABLE_TORCH_LIBRARY(ns, m) {                                                      \
    m.def(FLASHINFER_ATTENTION_RUN);                                                 \
    m.def(FLASHINFER_ATTENTION_PLAN);                                                \
  }                                                                                  \
  STABLE_TORCH_LIBRARY_IMPL(ns, key, m) { m.impl("run", flashinfer::binding::run); } \
  STABLE_TORCH_LIBRARY_IMPL(ns, CompositeExplicitAutograd, m) { m.impl("plan", flashinfer::binding::make_plan); }

}  // namespace flashinfer::binding
