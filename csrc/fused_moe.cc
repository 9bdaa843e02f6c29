// Operators of a mixture of experts except its matrix products.
#include "binding/binding.h"

#include <flashinfer/common/fused_moe.h>

#include <optional>
#include <tuple>

namespace flashinfer::binding {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kMaxExperts = 8192;

void route_out(const Tensor& weights, const Tensor& ids, const Tensor& logits, const OptionalTensor& bias,
               int64_t method, int64_t num_groups, int64_t top_groups, double factor) {
  const Check check("moe_route");
  const View in(logits, "logits"), out(weights, "weights"), out_ids(ids, "ids");
  check.rank(in, 2, 2);
  check.floating(in);
  check.last_contiguous(in);
  check.aligned(in);
  check.shape(out, {in.size(0), -1});
  if (out.dtype != DType::kFloat32) check.same_dtype(out, in);
  check.same_shape(out_ids, out);
  check.dtype(out_ids, {DType::kInt32, DType::kInt64});
  const int64_t experts = in.size(1), top_k = out.size(1);
  if (experts < 1 || experts > INT32_MAX / 2) check.fail(in, "got " + std::to_string(experts) + " experts");
  if (top_k < 1 || top_k > kMaxTopK)
    check.fail("top_k", "got " + std::to_string(top_k) + ", wanted 1 to " + std::to_string(kMaxTopK));
  if (method < 0 || method >= kRoutingMethods)
    check.fail("method", "got " + std::to_string(method) + ", wanted a RoutingMethodType");
  if (num_groups < 1 || num_groups > kMaxExpertGroups || experts % num_groups != 0)
    check.fail("n_group", "got " + std::to_string(num_groups) + ", wanted a divisor of " + std::to_string(experts) +
                              " experts, at most " + std::to_string(kMaxExpertGroups));
  if (top_groups < 1 || top_groups > num_groups)
    check.fail("topk_group",
               "got " + std::to_string(top_groups) + ", wanted 1 to n_group, " + std::to_string(num_groups));
  RouteParams p{};
  for (const View* arg : {&out, &out_ids}) {
    check.same_device(*arg, in);
    check.last_contiguous(*arg);
    check.writable(*arg);
    check.no_overlap(*arg, in, false);
  }
  check.no_overlap(out, out_ids, false);
  if (bias) {
    const View arg(*bias, "bias");
    check.shape(arg, {experts});
    check.dtype(arg, {DType::kFloat32});
    check.same_device(arg, in);
    check.contiguous(arg);
    p.bias = static_cast<const float*>(arg.data);
  }
  p.logits = in.data, p.logits_stride = in.stride(0), p.dtype = in.dtype;
  p.weights = out.data, p.narrow = out.dtype != DType::kFloat32, p.weights_stride = out.stride(0);
  p.ids = out_ids.data, p.ids_stride = out_ids.stride(0), p.wide_ids = out_ids.dtype == DType::kInt64;
  p.tokens = in.size(0), p.experts = static_cast<int>(experts), p.top_k = static_cast<int>(top_k);
  p.num_groups = static_cast<int>(num_groups), p.top_groups = static_cast<int>(top_groups);
  p.method = static_cast<RoutingMethod>(method), p.factor = static_cast<float>(factor);
  if (p.tokens == 0) return;
  const OnDevice where(in);
  route(p, where);
}

std::tuple<Tensor, Tensor, Tensor> sort(const Tensor& ids, int64_t num_experts, int64_t first_expert) {
  const Check check("moe_sort");
  const View in(ids, "ids");
  check.rank(in, 2, 2);
  check.dtype(in, {DType::kInt32, DType::kInt64});
  check.contiguous(in);
  check.aligned(in);
  if (num_experts < 1 || num_experts > kMaxExperts)
    check.fail("num_experts", "got " + std::to_string(num_experts) + ", wanted 1 to " + std::to_string(kMaxExperts));
  if (in.numel > INT32_MAX) check.fail(in, "got " + std::to_string(in.numel) + " slots, wanted an int32");
  const OnDevice where(in);
  const int32_t type = aoti_torch_dtype_int32();
  const int64_t bounds = num_experts + 1, slots = in.numel, shape[] = {in.size(0), in.size(1)};
  Tensor indptr = empty(&bounds, 1, ids, type), tokens = empty(&slots, 1, ids, type), rows = empty(shape, 2, ids, type);
  const int64_t numbers = sort_workspace(slots, static_cast<int>(num_experts));
  Tensor workspace = empty(&numbers, 1, ids, type);
  SortParams p{};
  p.ids = in.data, p.wide_ids = in.dtype == DType::kInt64, p.slots = slots, p.top_k = static_cast<int>(in.size(1));
  p.first_expert = first_expert, p.experts = static_cast<int>(num_experts);
  p.indptr = static_cast<int32_t*>(View(indptr, "m_indptr").data);
  p.tokens = static_cast<int32_t*>(View(tokens, "tokens").data);
  p.rows = static_cast<int32_t*>(View(rows, "rows").data);
  p.workspace = static_cast<int32_t*>(View(workspace, "workspace").data);
  sort_slots(p, where);
  return {std::move(indptr), std::move(tokens), std::move(rows)};
}

// Return a tensor of one float32 per expert, contiguous.
const float* of_experts(const Check& check, const OptionalTensor& tensor, const char* name, const View& like,
                        std::initializer_list<int64_t> shape) {
  if (!tensor) return nullptr;
  const View arg(*tensor, name);
  check.dtype(arg, {DType::kFloat32});
  check.shape(arg, shape);
  check.same_device(arg, like);
  check.contiguous(arg);
  return static_cast<const float*>(arg.data);
}

// Return m_indptr, [experts + 1].
const int32_t* bounds_of(const Check& check, const OptionalTensor& tensor, const View& like, int* experts) {
  *experts = 1;
  if (!tensor) return nullptr;
  const View arg(*tensor, "m_indptr");
  check.rank(arg, 1, 1);
  check.dtype(arg, {DType::kInt32});
  check.same_device(arg, like);
  check.contiguous(arg);
  if (arg.size(0) < 2) check.fail(arg, "got " + std::to_string(arg.size(0)) + " elements, wanted 2 at least");
  *experts = static_cast<int>(arg.size(0) - 1);
  return static_cast<const int32_t*>(arg.data);
}

std::tuple<Tensor, Tensor> activate(const Tensor& input, const OptionalTensor& m_indptr, int64_t activation,
                                    bool gate_first, const OptionalTensor& bias, const OptionalTensor& alpha,
                                    const OptionalTensor& beta, const OptionalTensor& limit,
                                    const OptionalTensor& quant_scale, bool blocks) {
  const Check check("moe_activate");
  const View in(input, "input");
  check.rank(in, 2, 2);
  check.floating(in);
  check.last_contiguous(in);
  check.aligned(in);
  if (activation < 0 || activation >= kActivations)
    check.fail("activation", "got " + std::to_string(activation) + ", which has no kernel");
  ActivateParams p{};
  p.act = static_cast<Activation>(activation);
  const bool gated = is_gated(p.act);
  p.gate_first = gate_first;
  if (gated && in.size(1) % 2 != 0)
    check.fail(in, "got " + std::to_string(in.size(1)) + " columns, wanted an even number for a gate");
  p.input = in.data, p.input_stride = in.stride(0), p.dtype = in.dtype;
  p.rows = in.size(0), p.size = gated ? in.size(1) / 2 : in.size(1);
  p.indptr = bounds_of(check, m_indptr, in, &p.experts);
  const int64_t experts = p.experts;
  check.that(m_indptr || !(bias || alpha || beta || limit), "m_indptr", "got None, wanted rows of experts");
  p.bias = of_experts(check, bias, "bias", in, {experts, in.size(1)});
  p.alpha = of_experts(check, alpha, "swiglu_alpha", in, {experts});
  p.beta = of_experts(check, beta, "swiglu_beta", in, {experts});
  p.limit = of_experts(check, limit, "swiglu_limit", in, {experts});
  const bool swiglu = p.act == Activation::kSwiglu || p.act == Activation::kSwigluBias;
  check.that(swiglu || p.act == Activation::kSitu || !(alpha || beta), "activation",
             "got another, wanted Swiglu or Situ for alpha and beta");
  check.that(swiglu || p.act == Activation::kSwigluStep || !limit, "activation",
             "got another, wanted Swiglu or SwigluStep for limit");
  check.that(!quant_scale || !blocks, "quant_scale", "got a scale, wanted None with scales of blocks");
  p.quant_scale = of_experts(check, quant_scale, "quant_scale", in, {});
  const OnDevice where(in);
  const int64_t shape[] = {p.rows, p.size}, scales[] = {blocks ? p.rows : 0, (p.size + kQuantBlock - 1) / kQuantBlock};
  std::optional<int32_t> type;
  if (quant_scale || blocks) type = aoti_torch_dtype_float8_e4m3fn();
  Tensor out = empty(shape, 2, input, type), block_scales = empty(scales, 2, input, aoti_torch_dtype_float32());
  p.output = View(out, "output").data;
  if (blocks) p.block_scales = static_cast<float*>(View(block_scales, "scales").data);
  if (p.rows > 0 && p.size > 0) activate_rows(p, where);
  return {std::move(out), std::move(block_scales)};
}

void finalize_out(const Tensor& out, const Tensor& input, const Tensor& rows, const OptionalTensor& weights,
                  const OptionalTensor& bias, const OptionalTensor& m_indptr) {
  const Check check("moe_finalize");
  const View in(input, "input"), to(out, "out"), slots(rows, "rows");
  check.rank(in, 2, 2);
  check.rank(slots, 2, 2);
  check.shape(to, {slots.size(0), in.size(1)});
  check.dtype(slots, {DType::kInt32});
  check.contiguous(slots);
  for (const View* arg : {&in, &to}) {
    check.floating(*arg);
    check.last_contiguous(*arg);
    check.aligned(*arg);
    check.same_device(*arg, slots);
  }
  check.writable(to);
  check.no_overlap(to, in, false);
  if (slots.numel > in.size(0))
    check.fail(in, "got " + std::to_string(in.size(0)) + " rows, wanted " + std::to_string(slots.numel) + " at least");
  FinalizeParams p{};
  p.input = in.data, p.input_stride = in.stride(0), p.dtype = in.dtype;
  p.out = to.data, p.out_stride = to.stride(0), p.out_dtype = to.dtype;
  p.rows = static_cast<const int32_t*>(slots.data);
  p.tokens = slots.size(0), p.size = in.size(1), p.top_k = static_cast<int>(slots.size(1));
  p.weights = of_experts(check, weights, "weights", in, {slots.size(0), slots.size(1)});
  p.indptr = bounds_of(check, m_indptr, in, &p.experts);
  check.that(!bias || m_indptr, "m_indptr", "got None, wanted rows of experts");
  p.bias = of_experts(check, bias, "bias", in, {p.experts, in.size(1)});
  if (p.tokens == 0 || p.size == 0) return;
  const OnDevice where(in);
  finalize(p, where);
}

FLASHINFER_LIBRARY(m) {
  m.impl("moe_route", box<route_out>);
  m.impl("moe_sort", box<sort>);
  m.impl("moe_activate", box<activate>);
  m.impl("moe_finalize", box<finalize_out>);
}

}  // namespace
}  // namespace flashinfer::binding
