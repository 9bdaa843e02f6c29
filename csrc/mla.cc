// Operators of the mla family. The kernels are in mla_cpu.cc, mla_cuda.cu and mla_sm90a.cu.
//
// mla_plan() fills a host buffer with the lists of a schedule. mla_run() takes a device copy of it.
#include <cmath>
#include <optional>
#include <tuple>

#define FLASHINFER_BINDING 1
#include <flashinfer/attention/mla.h>

#include "attention/lists.h"
#include "attention/profiler.h"
#include "attention/tables.h"
#include "binding/binding.h"
#include "mla_config.h"

namespace flashinfer::binding {
namespace {

// `workspace` selects the device. The other tensors are on the host.
void mla_plan(const Tensor& workspace, const Tensor& buffer, const Tensor& numbers, const OptionalTensor& qo_indptr,
              const OptionalTensor& kv_lens, const OptionalTensor& kv_indptr, const OptionalTensor& kv_indices,
              const OptionalTensor& last_page_len) {
  const Check check("mla_plan");
  const int device = View(workspace, "workspace").device;
  const PlanNumbers given = PlanNumbers::of(check, View(numbers, "numbers"));
  if (given.num_qo_heads < 1 || given.num_qo_heads > INT32_MAX / 64)
    check.fail("num_heads", "got " + std::to_string(given.num_qo_heads) + ", wanted a positive number");
  plan_batch(check, PlanTables(buffer, qo_indptr, kv_lens, kv_indptr, kv_indices, last_page_len), given,
             [&](const PlanRequest&, int64_t mean_rows) {
               return mla_limits<0>(mean_rows, check.int32("tile_rows", given.tile_rows), device);
             });
}

enum Size { kSizeMaxItems, kSizeMaxMerges, kSizeMaxSlots, kSizeTileRows, kSizeSlotRows, kNumSizes };

const int64_t* sizes_of(const Check& check, const View& sizes) {
  check.dtype(sizes, {DType::kInt64});
  check.shape(sizes, {kNumSizes});
  check.contiguous(sizes);
  if (sizes.device_type != aoti_torch_device_type_cpu())
    check.fail(sizes, "got a tensor of a device, wanted one on the CPU");
  const auto* numbers = static_cast<const int64_t*>(sizes.data);
  for (int i = 0; i < kNumSizes; ++i)
    if (numbers[i] < 0 || numbers[i] > INT32_MAX)
      check.fail(sizes, "got a negative number or one of more than 2147483647");
  if (numbers[kSizeTileRows] < 1) check.fail(sizes, "got 0 rows of a tile, wanted 1 or more");
  return numbers;
}

const int32_t* table(const Check& check, const View& arg, const View& like) {
  check.dtype(arg, {DType::kInt32});
  check.rank(arg, 1, 1);
  check.contiguous(arg);
  check.same_device(arg, like);
  return static_cast<const int32_t*>(arg.data);
}

struct MlaTensors {
  View q_nope, q_pe, ckv, kpe, out;
  std::optional<View> ckv_scales, sinks;

  // Return the element types of queries and outputs, and of the caches.
  std::tuple<DType, DType> types() const { return {q_nope.dtype, ckv.dtype}; }

  void check_all(const Check& check) const {
    check.rank(q_nope, 3, 3);
    check.rank(ckv, 3, 3);
    const int64_t tokens = q_nope.size(0), heads = q_nope.size(1);
    check.floating(q_nope);
    require_value("dtypes", kDtypes, types(), kDtypesText);
    check.shape(q_nope, {-1, -1, kMlaCkv});
    check.shape(q_pe, {tokens, heads, kMlaKpe});
    check.shape(ckv, {-1, -1, kMlaCkv});
    check.shape(kpe, {ckv.size(0), ckv.size(1), kMlaKpe});
    check.shape(out, {tokens, heads, kMlaCkv});
    if (heads < 1 || tokens * heads > INT32_MAX) check.fail(q_nope, "got no head, or more than 2147483647 rows");
    if (ckv.size(1) < 1 || ckv.size(1) > INT32_MAX / 2)
      check.fail(ckv, "got a page size of " + std::to_string(ckv.size(1)) + ", wanted 1 to 1073741823");
    for (const View* arg : {&q_nope, &q_pe, &ckv, &kpe, &out}) {
      check.same_dtype(*arg, arg == &ckv || arg == &kpe ? ckv : q_nope), check.same_device(*arg, q_nope);
      check.last_contiguous(*arg), check.wide_rows(*arg);
    }
    check.writable(out);
    for (const View* arg : {&q_nope, &q_pe, &ckv, &kpe}) check.no_overlap(out, *arg, false);
    if (sinks) {
      check_floats(check, *sinks, {heads});
      check.contiguous(*sinks);
    }
    if (ckv_scales) {
      check_floats(check, *ckv_scales, {ckv.size(0), ckv.size(1), kMlaScales});
      check.last_contiguous(*ckv_scales);
      if (size_of(ckv.dtype) != 1) check.fail(*ckv_scales, "got a tensor, wanted none: the cache is not 8-bit");
    }
    if (kOnCuda && ckv_scales.has_value() != bool{SCALED})
      check.fail("ckv_scale_arr",
                 SCALED ? "got none, wanted a tensor" : "got a tensor, and this module has no kernels for it");
  }

  void check_floats(const Check& check, const View& arg, std::initializer_list<int64_t> shape) const {
    check.dtype(arg, {DType::kFloat32});
    check.shape(arg, shape);
    check.same_device(arg, q_nope);
    check.no_overlap(out, arg, false);
  }

  void put_into(MlaParams& params) const {
    params.q = q_nope.data, params.q_row = q_nope.stride(0), params.q_head = q_nope.stride(1);
    params.q_pe = q_pe.data, params.q_pe_row = q_pe.stride(0), params.q_pe_head = q_pe.stride(1);
    params.o = out.data, params.o_row = out.stride(0), params.o_head = out.stride(1);
    params.num_tokens = q_nope.size(0), params.num_qo_heads = static_cast<int32_t>(q_nope.size(1));
    params.num_kv_heads = 1, params.group = FastDiv(static_cast<uint32_t>(params.num_qo_heads));
    params.kv.k = ckv.data, params.kv.k_page = ckv.stride(0), params.kv.k_row = ckv.stride(1);
    params.kv.v = kpe.data, params.kv.v_page = kpe.stride(0), params.kv.v_row = kpe.stride(1);
    params.kv.page_size = FastDiv(static_cast<uint32_t>(ckv.size(1))), params.kv.num_pages = ckv.size(0);
    if (sinks) params.maybe_sinks = static_cast<const float*>(sinks->data);
    if (ckv_scales) {
      params.ckv_scales = static_cast<const float*>(ckv_scales->data);
      params.ckv_scales_page = ckv_scales->stride(0), params.ckv_scales_row = ckv_scales->stride(1);
    }
    params.window_left = -1;
    params.rope_rcp_scale = params.rope_rcp_theta = 1.0;
  }
};

// `profiler_buffer`: one buffer if the module's kernels write events, otherwise none.
template <bool kProfiler, typename... Buffer>
void mla_run(const Tensor& q_nope, const Tensor& q_pe, const Tensor& ckv_cache, const Tensor& kpe_cache,
             const Tensor& out, const OptionalTensor& lse, const Tensor& kv_indptr, const Tensor& kv_indices,
             const Tensor& plan, const Tensor& sizes, const OptionalTensor& float_workspace, bool causal,
             double sm_scale, double o_scale, double pe_factor, const OptionalTensor& ckv_scales,
             const OptionalTensor& sinks, const Buffer&... profiler_buffer) {
  const Check check("mla_run");
  MlaTensors tensors{View(q_nope, "q_nope"),
                     View(q_pe, "q_pe"),
                     View(ckv_cache, "ckv_cache"),
                     View(kpe_cache, "kpe_cache"),
                     View(out, "out"),
                     {},
                     {}};
  if (ckv_scales) tensors.ckv_scales.emplace(*ckv_scales, "ckv_scale_arr");
  if (sinks) tensors.sinks.emplace(*sinks, "sinks");
  tensors.check_all(check);
  Profiled<MlaParams, kProfiler> params{};
  tensors.put_into(params);
  const View &q = tensors.q_nope, indptr(kv_indptr, "kv_indptr"), indices(kv_indices, "kv_indices");
  params.kv.indptr = table(check, indptr, q), params.kv.indices = table(check, indices, q);
  if (indptr.numel < 1) check.fail(indptr, "got no element, wanted one more than requests");
  const int64_t* numbers = sizes_of(check, View(sizes, "sizes"));
  params.max_items = static_cast<int32_t>(numbers[kSizeMaxItems]);
  params.max_merges = static_cast<int32_t>(numbers[kSizeMaxMerges]);
  params.tile_rows = static_cast<int32_t>(numbers[kSizeTileRows]);
  params.slot_rows = static_cast<int32_t>(numbers[kSizeSlotRows]);
  const View lists(plan, "plan");
  check.same_device(lists, q);
  use_plan(check, params, lists, indptr.numel - 1);
  if (!(sm_scale > 0 && sm_scale < 1e30))
    check.fail("sm_scale", "got " + std::to_string(sm_scale) + ", wanted a positive number");
  params.sm_scale_log2 = static_cast<float>(sm_scale * math::log2e);
  if (!(std::abs(o_scale) < 1e30)) check.fail("o_scale", "got " + std::to_string(o_scale) + ", wanted a finite number");
  params.o_scale = static_cast<float>(o_scale);
  params.pe_factor = static_cast<float>(pe_factor);
  if (!(params.pe_factor > 0 && pe_factor < 1e30) || (pe_factor != 1 && size_of(tensors.ckv.dtype) != 1))
    check.fail("pe_factor", "got " + std::to_string(pe_factor) + ", wanted a positive number, and 1 without 8 bits");
  params.mask_mode = causal ? MaskMode::kCausal : MaskMode::kNone;
  if (lse) {
    const View view(*lse, "lse");
    check.dtype(view, {DType::kFloat32});
    check.shape(view, {q.size(0), q.size(1)});
    check.contiguous(view);
    check.same_device(view, q);
    check.no_overlap(view, tensors.out, false);
    params.lse = static_cast<float*>(view.data);
  }
  ArgumentDevice call_device;
  call_device.require(check, q);
  (put_profiler(check, params, profiler_buffer, call_device), ...);
  const OnDevice where(q);
  Partials partials;
  OptionalTensor temporary;
  if (float_workspace) {
    const View view(*float_workspace, "float_workspace");
    check.contiguous(view);
    check.same_device(view, q);
    partials = {view.data, view.numel * size_of(view.dtype)};
  } else if (numbers[kSizeMaxSlots] > 0) {
    partials.bytes = bytes_of_partials(params, numbers[kSizeMaxSlots], kMlaCkv);
    temporary.emplace(empty_bytes(partials.bytes, q_nope));
    require(aoti_torch_get_data_ptr(temporary->get(), &partials.data), "the workspace");
  }
  if (numbers[kSizeMaxSlots] > 0) use_partials(check, params, partials, numbers[kSizeMaxSlots], kMlaCkv);
  if (tensors.out.numel == 0) return;
  call_row("dtypes", kParts, tensors.types(), kDtypesText, [&](auto part) { mla<part, kProfiler>(params, where); });
}

template <bool kProfiler, typename Library>
void implement_run(Library& m) {
  if constexpr (kProfiler) {
    m.impl("mla_run", box<mla_run<kProfiler, Tensor>>);
  } else {
    m.impl("mla_run", box<mla_run<kProfiler>>);
  }
}

FLASHINFER_LIBRARY(m) {
  m.impl("mla_plan", box<mla_plan>);
  implement_run<PROFILER>(m);
}

}  // namespace
}  // namespace flashinfer::binding
