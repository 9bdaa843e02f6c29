// What the operators of decode and prefill take beside queries, keys, values and results.
#pragma once

#include <algorithm>
#include <string_view>

#define FLASHINFER_BINDING 1
#include <flashinfer/attention/schedule.h>

#include "binding/binding.h"

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

// An operator's arguments, one after the other. Those that a failed check leaves are given back: each tensor here is a
// reference to one, and the schema says which they are.
class Arguments {
 public:
  Arguments(StableIValue* stack, uint64_t count, const char* schema)
      : first_(stack), next_(stack), end_(stack + count), schema_(schema) {}
  Arguments(const Arguments&) = delete;
  ~Arguments() {
    if (next_ != end_) give_back();
  }

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
  void give_back() {
    std::string_view rest(schema_);
    rest.remove_prefix(rest.find('(') + 1);
    for (StableIValue* at = first_; at != end_; ++at) {
      const std::string_view type = rest.substr(0, rest.find(' '));
      const bool optional = type.back() == '?', tensor = type.substr(0, 6) == "Tensor";
      if (at == next_ && optional && tensor) {
        take<OptionalTensor>();
      } else if (at == next_ && optional) {
        take<std::optional<double>>();  // numbers of all kinds are kept alike
      } else if (at == next_ && tensor) {
        take<Tensor>();
      } else if (at == next_) {
        ++next_;
      }
      rest.remove_prefix(std::min(rest.size(), rest.find(", ") + 2));
    }
  }

  StableIValue *first_, *next_, *end_;
  const char* schema_;
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

// Where all tensors of a call are; the first one says it.
class Place {
 public:
  void must_hold(const Check& check, const View& arg) {
    if (first_ == nullptr) first_ = arg.name, type_ = arg.device_type, index_ = arg.device;
    if (arg.device_type != type_ || arg.device != index_)
      check.fail(arg, "is on another device than " + std::string(first_));
  }

 private:
  const char* first_ = nullptr;
  int type_ = 0, index_ = 0;
};

// A contiguous tensor of T, or null where there is none.
template <typename T>
const T* data_of(const Check& check, const OptionalTensor& tensor, const char* name, Place& place,
                 int64_t at_least = 0) {
  if (!tensor) return nullptr;
  const View view(*tensor, name);
  check.dtype(view, {kind_of<T>()});
  check.contiguous(view);
  place.must_hold(check, view);
  if (view.numel < at_least)
    check.fail(view, "got " + std::to_string(view.numel) + " elements, wanted at least " + std::to_string(at_least));
  return static_cast<const T*>(view.data);
}

template <typename T>
void take_tensor(const Check& check, Arguments& arguments, T*& member, const char* name, bool optional, Place& place) {
  OptionalTensor tensor = optional ? arguments.take<OptionalTensor>() : OptionalTensor(arguments.take<Tensor>());
  member = const_cast<T*>(data_of<T>(check, tensor, name, place));  // what a variant does with its own is its business
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

// Memory for partial results, or none.
struct Partials {
  void* data = nullptr;
  int64_t bytes = 0;
};

inline void use_partials(const Check& check, Params& params, const Partials& workspace, int64_t max_slots,
                         int64_t dim) {
  const int64_t rows = max_slots * params.num_kv_heads * params.slot_rows, needed = 4 * rows * (dim + 1);
  if (workspace.bytes < needed)
    check.fail("float_workspace",
               "got " + std::to_string(workspace.bytes) + " bytes, wanted " + std::to_string(needed));
  params.partial_o = static_cast<float*>(workspace.data), params.partial_lse = params.partial_o + rows * dim;
}

// The arguments of a Setting, in the order of the schema; `written` marks what is written to.
#define FLASHINFER_ATTENTION_SETTING(written)                                                                 \
  "Tensor? kv_indptr, Tensor? kv_indices, Tensor? plan, Tensor" written                                       \
  "? float_workspace, int batch_size, int max_items, int max_merges, int max_slots, int tile_rows, "          \
  "int slot_rows, Tensor? custom_mask, Tensor? mask_indptr, Tensor? prefix_len, Tensor? token_pos_in_items, " \
  "int token_pos_in_items_len, Tensor? max_item_len, int kv_layout, int mask_mode, int window_left, "         \
  "float o_scale, float rope_scale, float rope_theta, int variant" ADDITIONAL_SCHEMA

// All that a call is told beside queries, keys, values and results: checked as far as these do not matter.
struct Setting {
  Params params{};
  Place place;
  int64_t max_slots, kv_layout, mask_bytes = 0;
  int64_t masks = 1;  // without a plan: how many mask_indptr tells apart
  int32_t variant;
  bool paged, planned;
  Partials workspace;

  // `start`: where the first tensor that was seen before, a query, is.
  Setting(const Check& check, Arguments& arguments, const Place& start) : place(start) {
    const OptionalTensor kv_indptr = arguments.take<OptionalTensor>(), kv_indices = arguments.take<OptionalTensor>(),
                         plan = arguments.take<OptionalTensor>(), float_workspace = arguments.take<OptionalTensor>();
    const int64_t batch_size = arguments.take<int64_t>();
    params.max_items = arguments.take_int32(check, "max_items");
    params.max_merges = arguments.take_int32(check, "max_merges");
    max_slots = arguments.take<int64_t>();
    params.tile_rows = arguments.take_int32(check, "tile_rows");
    params.slot_rows = arguments.take_int32(check, "slot_rows");
    planned = plan.has_value(), paged = kv_indices.has_value();
    params.kv.indices = data_of<int32_t>(check, kv_indices, "kv_indices", place);
    params.kv.indptr = data_of<int32_t>(check, kv_indptr, "kv_indptr", place, batch_size + 1);
    if (paged && !params.kv.indptr) check.fail("kv_indptr", "got none, wanted one beside kv_indices");
    if (paged && !planned) check.fail("plan", "got none, wanted one for a paged cache");
    if (paged && !params.kv.indices) {  // an empty tensor has no data: no request has a page
      static const int32_t nothing = 0;
      params.kv.indices = &nothing;
    }
    if (planned) take_plan(check, View(*plan, "plan"), float_workspace, batch_size);
    take_masks(check, arguments, planned ? batch_size : 1);
    params.o_scale = static_cast<float>(arguments.take<double>());
    params.rope_rcp_scale = 1.0 / arguments.take<double>();
    params.rope_rcp_theta = 1.0 / arguments.take<double>();
    variant = arguments.take_int32(check, "variant");
#define FLASHINFER_TAKE(name, type, optional) take_tensor(check, arguments, params.name, #name, optional, place);
    ADDITIONAL_TENSORS(FLASHINFER_TAKE)
#undef FLASHINFER_TAKE
#define FLASHINFER_TAKE(name, type) take_scalar(arguments, params.name);
    ADDITIONAL_SCALARS(FLASHINFER_TAKE)
#undef FLASHINFER_TAKE
  }

 private:
  void take_plan(const Check& check, const View& lists, const OptionalTensor& float_workspace, int64_t batch_size) {
    place.must_hold(check, lists);
    use_plan(check, params, lists, batch_size);
    if (max_slots <= 0) return;
    if (!float_workspace) check.fail("float_workspace", "got none, wanted one for split keys");
    const View bytes(*float_workspace, "float_workspace");
    place.must_hold(check, bytes);
    check.contiguous(bytes);
    workspace = {bytes.data, bytes.numel * size_of(bytes.dtype)};
  }

  // From custom_mask to window_left.
  void take_masks(const Check& check, Arguments& arguments, int64_t requests) {
    const OptionalTensor custom_mask = arguments.take<OptionalTensor>(), mask_indptr = arguments.take<OptionalTensor>(),
                         prefix_len = arguments.take<OptionalTensor>(),
                         token_pos_in_items = arguments.take<OptionalTensor>();
    params.token_pos_in_items_len = arguments.take_int32(check, "token_pos_in_items_len");
    const OptionalTensor max_item_len = arguments.take<OptionalTensor>();
    kv_layout = arguments.take<int64_t>();
    if (kv_layout != 0 && kv_layout != 1) check.fail("kv_layout", "wanted NHD or HND");
    params.mask_mode = mask_mode_of(check, arguments.take<int64_t>());
    params.window_left = arguments.take_int32(check, "window_left");
    AttentionParams& common = params;  // a variant may have parameters of its own of these two names
    common.custom_mask = data_of<uint8_t>(check, custom_mask, "custom_mask", place);
    common.mask_indptr = data_of<int32_t>(check, mask_indptr, "mask_indptr", place, requests + 1);
    if (custom_mask) mask_bytes = View(*custom_mask, "custom_mask").numel;
    if (mask_indptr && !planned) masks = View(*mask_indptr, "mask_indptr").numel - 1;
    if (params.mask_mode == MaskMode::kCustom && !custom_mask)
      check.fail("custom_mask", "got none, wanted one for the custom mask mode");
    params.prefix_len = data_of<uint32_t>(check, prefix_len, "prefix_len", place, requests);
    params.token_pos_in_items = data_of<uint16_t>(check, token_pos_in_items, "token_pos_in_items", place,
                                                  requests * params.token_pos_in_items_len);
    params.max_item_len = data_of<uint16_t>(check, max_item_len, "max_item_len", place, requests);
    if (params.mask_mode == MaskMode::kMultiItem && !(prefix_len && token_pos_in_items && max_item_len))
      check.fail("prefix_len",
                 "got none, wanted prefix_len, token_pos_in_items and max_item_len for multi-item scoring");
  }
};

}  // namespace flashinfer::binding
