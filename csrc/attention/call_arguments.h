// The arguments of a call other than queries, keys, values and results, with all checks that need only these.
#pragma once

#include "attention/arguments.h"
#include "attention/lists.h"
#include "attention/profiler.h"

namespace flashinfer::binding {

inline MaskMode mask_mode_of(const Check& check, int64_t mode) {
  if (mode < 0 || mode > 3) check.fail("mask_mode", "got " + std::to_string(mode) + ", wanted 0 to 3");
  return static_cast<MaskMode>(mode);
}

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

// Return the data of a contiguous tensor of T, or null without a tensor.
template <typename T>
const T* data_of(const Check& check, const OptionalTensor& tensor, const char* name, ArgumentDevice& call_device,
                 int64_t at_least = 0) {
  if (!tensor) return nullptr;
  const View view(*tensor, name);
  check.dtype(view, {kind_of<T>()});
  check.contiguous(view);
  call_device.require(check, view);
  if (view.numel < at_least)
    check.fail(view, "got " + std::to_string(view.numel) + " elements, wanted at least " + std::to_string(at_least));
  return static_cast<const T*>(view.data);
}

// Store a variant's parameter in the member that its functor reads.
template <typename T>
void put_parameter(const Check& check, const Tensor& tensor, T*& member, const char* name,
                   ArgumentDevice& call_device) {
  const View view(tensor, name);
  check.dtype(view, {kind_of<T>()});
  check.contiguous(view);
  call_device.require(check, view);
  member = static_cast<T*>(view.data);  // a variant may also write to its own tensors
}
template <typename T>
void put_parameter(const Check& check, const OptionalTensor& tensor, T*& member, const char* name,
                   ArgumentDevice& call_device) {
  if (tensor) put_parameter(check, *tensor, member, name, call_device);
}
template <typename From, typename T>
std::enable_if_t<std::is_arithmetic_v<T>> put_parameter(From number, T& member) {
  member = static_cast<T>(number);
}

struct CallArguments {
  Params params{};
  ArgumentDevice call_device;
  int64_t max_slots, kv_layout, mask_bytes = 0;
  int64_t tickets = 0;  // capacity of the plan
  int64_t masks = 1;    // without a plan: number of masks in mask_indptr
  int32_t variant;
  bool paged, planned;
  Partials workspace;

  // `start`: the device of an earlier tensor, the queries.
  template <typename Given>
  CallArguments(const Check& check, const Given& given, const VariantArguments& parameters, const ArgumentDevice& start)
      : call_device(start),
        max_slots(given.max_slots),
        kv_layout(given.kv_layout),
        variant(check.int32("variant", given.variant)),
        paged(given.kv_indices.has_value()),
        planned(given.plan.has_value()) {
    put_tables(check, given);
    if (planned) put_plan(check, given), put_workspace(check, given);
    put_masks(check, given);
    params.o_scale = static_cast<float>(given.o_scale);
    params.rope_rcp_scale = 1.0 / given.rope_scale;
    params.rope_rcp_theta = 1.0 / given.rope_theta;
#define FLASHINFER_TENSOR_(name, type, optional) put_parameter(check, parameters.name, params.name, #name, call_device);
#define FLASHINFER_SCALAR_(name, type) put_parameter(parameters.name, params.name);
    ADDITIONAL_TENSORS(FLASHINFER_TENSOR_)
    ADDITIONAL_SCALARS(FLASHINFER_SCALAR_)
#undef FLASHINFER_TENSOR_
#undef FLASHINFER_SCALAR_
    put_profiler_of(check, params, parameters, call_device);
    (void)parameters;  // a variant may have none
  }

  // The same call of another plan: tables and lists are others.
  template <typename Given>
  void replan(const Check& check, const Given& given) {
    if (paged != given.kv_indices.has_value() || !planned) check.fail("kv_indices", "got another kind of keys");
    max_slots = given.max_slots;
    put_tables(check, given);
    put_plan(check, given);
    if (max_slots > 0 && workspace.data == nullptr)
      check.fail("float_workspace", "got none, wanted one for split keys");
  }

 private:
  template <typename Given>
  void put_tables(const Check& check, const Given& given) {
    params.kv.indices = data_of<int32_t>(check, given.kv_indices, "kv_indices", call_device);
    params.kv.indptr = data_of<int32_t>(check, given.kv_indptr, "kv_indptr", call_device, given.batch_size + 1);
    if (paged && !params.kv.indptr) check.fail("kv_indptr", "got none, wanted one with kv_indices");
    if (paged && !planned) check.fail("plan", "got none, wanted one for a paged cache");
    if (paged && !params.kv.indices) {  // an empty tensor has no data: no request has a page
      static const int32_t nothing = 0;
      params.kv.indices = &nothing;
    }
  }

  template <typename Given>
  void put_plan(const Check& check, const Given& given) {
    params.max_items = check.int32("max_items", given.max_items);
    params.max_merges = check.int32("max_merges", given.max_merges);
    params.tile_rows = check.int32("tile_rows", given.tile_rows);
    params.slot_rows = check.int32("slot_rows", given.slot_rows);
    const View lists(*given.plan, "plan");
    call_device.require(check, lists);
    tickets = use_plan(check, params, lists, given.batch_size);
  }

  template <typename Given>
  void put_workspace(const Check& check, const Given& given) {
    if (!given.float_workspace) {
      if (max_slots > 0) check.fail("float_workspace", "got none, wanted one for split keys");
      return;
    }
    const View bytes(*given.float_workspace, "float_workspace");
    call_device.require(check, bytes);
    check.contiguous(bytes);
    workspace = {bytes.data, bytes.numel * size_of(bytes.dtype)};
  }

  template <typename Given>
  void put_masks(const Check& check, const Given& given) {
    const int64_t requests = planned ? given.batch_size : 1;
    if (kv_layout != 0 && kv_layout != 1) check.fail("kv_layout", "wanted NHD or HND");
    params.mask_mode = mask_mode_of(check, given.mask_mode);
    params.window_left = check.int32("window_left", given.window_left);
    AttentionParams& common = params;  // a variant may have parameters of these two names
    common.custom_mask = data_of<uint8_t>(check, given.custom_mask, "custom_mask", call_device);
    common.mask_indptr = data_of<int32_t>(check, given.mask_indptr, "mask_indptr", call_device, requests + 1);
    if (given.custom_mask) mask_bytes = View(*given.custom_mask, "custom_mask").numel;
    if (given.mask_indptr && !planned) masks = View(*given.mask_indptr, "mask_indptr").numel - 1;
    if (params.mask_mode == MaskMode::kCustom && !given.custom_mask)
      check.fail("custom_mask", "got none, wanted one for the custom mask mode");
    put_items(check, given, requests);
  }

  template <typename Given>
  void put_items(const Check& check, const Given& given, int64_t requests) {
    params.token_pos_in_items_len = check.int32("token_pos_in_items_len", given.token_pos_in_items_len);
    params.prefix_len = data_of<uint32_t>(check, given.prefix_len, "prefix_len", call_device, requests);
    params.token_pos_in_items = data_of<uint16_t>(check, given.token_pos_in_items, "token_pos_in_items", call_device,
                                                  requests * params.token_pos_in_items_len);
    if (params.mask_mode != MaskMode::kMultiItem) return;
    if (!planned) check.fail("plan", "got none, wanted one for multi-item scoring");
    if (!(given.prefix_len && given.token_pos_in_items))
      check.fail("prefix_len", "got none, wanted prefix_len and token_pos_in_items for multi-item scoring");
  }
};

}  // namespace flashinfer::binding
