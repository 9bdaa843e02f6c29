// Operators of the allreduce family.
#include "allreduce/group.h"
#include "allreduce/moe_alltoall.h"
#include "binding/binding.h"
#include "binding/quant_scale.h"

#include <flashinfer/common/allreduce.h>

namespace flashinfer::binding {
namespace {

// Arguments of the norm after the sum, and of its quantisation.
struct NormArguments {
  const Tensor &residual_in, &weight, &residual_out;
  const Tensor* norm_out;  // null: not wanted
  double eps, weight_bias;
};
struct QuantArguments {
  NormQuant form;
  const Tensor& quant_out;
  const std::optional<Tensor>& scale_out;
  double scale;
  const std::optional<Tensor>& scale_tensor;
  int64_t group;
};

// Check the tensors of a quantised norm, and put them into the parameters.
void take_quant(const Check& check, AllReduceParams& p, const View& x, const QuantArguments& arguments,
                const View& quant_out, const std::optional<View>& scale_out) {
  const NormQuant quant = arguments.form;
  const int64_t group = arguments.group;
  check.dtype(quant_out, {DType::kFloat8E4M3});
  check.same_shape(quant_out, x);
  check.same_device(quant_out, x);
  check.contiguous(quant_out);
  p.quant = quant, p.quant_out = quant_out.data;
  if (quant == NormQuant::kStatic) {
    p.scale = quant_scale(check, arguments.scale, arguments.scale_tensor, "scale_factor", x);
    return;
  }
  if (!scale_out) check.fail("scale_out", "got None, wanted a tensor");
  check.same_device(*scale_out, x);
  check.aligned(*scale_out);
  p.scale_out = scale_out->data;
  if (quant == NormQuant::kToken) {
    check.dtype(*scale_out, {DType::kFloat32});
    check.contiguous(*scale_out);
    if (scale_out->numel != p.rows)
      check.fail(*scale_out, "got " + std::to_string(scale_out->numel) + " elements, wanted one for each row of input");
    return;
  }
  const int64_t part = kPartBytes / size_of(x.dtype), lanes = group / part;
  if (group < part || group % part != 0 || lanes > 32 || (lanes & (lanes - 1)) != 0)
    check.fail("block_quant_group_size", "got " + std::to_string(group) + ", wanted a power of two from " +
                                             std::to_string(part) + " to " + std::to_string(32 * part));
  if (p.hidden % group != 0)
    check.fail(x, "got " + std::to_string(p.hidden) + " columns, wanted a multiple of block_quant_group_size");
  p.columns = static_cast<int>(group);
  check.dtype(*scale_out, {DType::kInt32});
  check.shape(*scale_out, {p.rows, (p.hidden / group + 3) / 4});
  check.writable(*scale_out);
  p.scale_row_stride = scale_out->stride(0), p.scale_word_stride = scale_out->stride(1);
}

void run(const Tensor& input, const Tensor* out, const NormArguments* norm, const QuantArguments* quant,
         const Tensor& order, const Tensor& table, int64_t shots, std::optional<bool> enable_pdl) {
  const Check check("allreduce_fusion");
  const View x(input, "input"), ordered(order, "workspace");
  check.rank(x, 2, 2);
  check.floating(x);
  check.contiguous(x);
  check.aligned(x);
  check.same_device(x, ordered);
  const NormQuant form = quant ? quant->form : NormQuant::kNone;
  AllReduceParams p{.group = group_of(check, View(table, "workspace")),
                    .input = x.data,
                    .residual_in = nullptr,
                    .weight = nullptr,
                    .out = nullptr,
                    .residual_out = nullptr,
                    .norm_out = nullptr,
                    .quant_out = nullptr,
                    .scale_out = nullptr,
                    .scale = {},
                    .quant = NormQuant::kNone,
                    .columns = 0,
                    .scale_row_stride = 0,
                    .scale_word_stride = 0,
                    .rows = x.size(0),
                    .hidden = x.size(1),
                    .row_bytes = static_cast<uint32_t>(x.size(1) * size_of(x.dtype)),
                    .kind = 0,
                    .two_shots = false,
                    .eps = norm ? norm->eps : 0.0,
                    .weight_bias = norm ? static_cast<float>(norm->weight_bias) : 0.0f,
                    .dtype = x.dtype};
  p.two_shots = shots == 0 ? is_faster_in_two_shots(p.group.ranks, p.rows * p.row_bytes) : shots == 2;
  p.kind = kind_of(x.dtype, norm != nullptr, form, p.two_shots);
  const int64_t row_bytes = padded(p.hidden * size_of(x.dtype));
  if (p.rows > INT32_MAX || row_bytes > INT32_MAX) check.fail(x, "got a size of more than 2^31 - 1");
  if (p.group.ranks > 1 && p.rows * row_bytes > p.group.slot_bytes)
    check.fail(x, "got " + std::to_string(p.rows * row_bytes) + " bytes in rows padded to 16 bytes, wanted at most " +
                      std::to_string(p.group.slot_bytes) + " as the workspace has");

  std::optional<View> read[2], written[5];
  const auto same_form = [&](const View& arg) {
    check.same_shape(arg, x);
    check.same_dtype(arg, x);
    check.same_device(arg, x);
    check.contiguous(arg);
    check.aligned(arg);
  };
  const auto like_input = [&](const Tensor& tensor, const char* name, std::optional<View>& to) -> void* {
    to.emplace(tensor, name);
    same_form(*to);
    return to->data;
  };
  read[0].emplace(x);
  if (out) p.out = like_input(*out, "output", written[0]);
  if (norm) {
    const View w(norm->weight, "rms_gamma");
    check.shape(w, {p.hidden});
    check.same_dtype(w, x);
    check.same_device(w, x);
    check.contiguous(w);
    check.aligned(w);
    p.weight = w.data;
    p.residual_in = like_input(norm->residual_in, "residual_in", read[1]);
    p.residual_out = like_input(norm->residual_out, "residual_out", written[1]);
    if (norm->norm_out) p.norm_out = like_input(*norm->norm_out, "norm_out", written[2]);
    if (quant) {
      written[3].emplace(quant->quant_out, "quant_out");
      if (quant->scale_out) written[4].emplace(*quant->scale_out, "scale_out");
      take_quant(check, p, x, *quant, *written[3], written[4]);
    }
    for (const auto& one : written)
      if (one) check.no_overlap(*one, w, false);
  }
  for (int i = 0; i < 5; ++i) {
    if (!written[i]) continue;
    for (const auto& one : read)
      if (one) check.no_overlap(*written[i], *one, i < 3);
    for (int k = 0; k < i; ++k)
      if (written[k]) check.no_overlap(*written[i], *written[k], false);
  }
  flashinfer::allreduce(p, OnDevice(x, enable_pdl));
  if (!kOnCuda) check_alive(check, p.group);  // the call has ended
}

const Tensor* pointer_to(const std::optional<Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

void allreduce(const Tensor& input, const Tensor& out, const Tensor& order, const Tensor& table, int64_t shots,
               std::optional<bool> enable_pdl) {
  run(input, &out, nullptr, nullptr, order, table, shots, enable_pdl);
}

void allreduce_norm(const Tensor& input, const Tensor& residual_in, const Tensor& weight,
                    const std::optional<Tensor>& out, const Tensor& residual_out, const Tensor& norm_out,
                    const Tensor& order, const Tensor& table, double eps, double weight_bias, int64_t shots,
                    std::optional<bool> enable_pdl) {
  const NormArguments norm{residual_in, weight, residual_out, &norm_out, eps, weight_bias};
  run(input, pointer_to(out), &norm, nullptr, order, table, shots, enable_pdl);
}

void allreduce_norm_quant(const Tensor& input, const Tensor& residual_in, const Tensor& weight,
                          const std::optional<Tensor>& out, const Tensor& residual_out,
                          const std::optional<Tensor>& norm_out, const Tensor& quant_out,
                          const std::optional<Tensor>& scale_out, const Tensor& order, const Tensor& table,
                          int64_t quant, double scale, const std::optional<Tensor>& scale_tensor, int64_t group,
                          double eps, double weight_bias, int64_t shots, std::optional<bool> enable_pdl) {
  const NormArguments norm{residual_in, weight, residual_out, pointer_to(norm_out), eps, weight_bias};
  const QuantArguments quantise{static_cast<NormQuant>(quant), quant_out, scale_out, scale, scale_tensor, group};
  run(input, pointer_to(out), &norm, &quantise, order, table, shots, enable_pdl);
}

// Runs reduce-scatter, or all-gather. A share is the rows of one rank.
void run_on_shares(const Check& check, Collective collective, const Tensor& input, const Tensor& output,
                   const Tensor& order, const Tensor& table, std::optional<bool> enable_pdl) {
  const View x(input, "input"), y(output, "output"), ordered(order, "workspace");
  check.rank(x, 2, 2);
  check.floating(x);
  check.same_dtype(y, x);
  for (const View* one : {&x, &y}) {
    check.same_device(*one, ordered);
    check.contiguous(*one);
    check.aligned(*one);
  }
  AllReduceParams p{};
  p.group = group_of(check, View(table, "workspace"));
  const bool is_gather = collective == Collective::kAllGather;
  const int64_t ranks = p.group.ranks;
  if (!is_gather && x.size(0) % ranks != 0)
    check.fail(
        x, "got " + std::to_string(x.size(0)) + " rows, wanted a multiple of the " + std::to_string(ranks) + " ranks");
  check.shape(y, {is_gather ? x.size(0) * ranks : x.size(0) / ranks, x.size(1)});
  p.input = x.data, p.out = y.data, p.dtype = x.dtype;
  p.rows = is_gather ? x.size(0) : y.size(0), p.hidden = x.size(1);
  p.row_bytes = static_cast<uint32_t>(p.hidden * size_of(x.dtype)), p.kind = kind_of(x.dtype, collective);
  const int64_t row_bytes = padded(p.hidden * size_of(x.dtype)), share_bytes = p.rows * p.hidden * size_of(x.dtype);
  if (p.rows > INT32_MAX || row_bytes > INT32_MAX) check.fail(x, "got a size of more than 2^31 - 1");
  if (ranks > 1 && p.rows * row_bytes > p.group.slot_bytes)
    check.fail(x, "got " + std::to_string(p.rows * row_bytes) + " bytes for each rank in rows padded to 16 bytes, " +
                      "wanted at most " + std::to_string(p.group.slot_bytes) + " as the workspace has");
  const View &whole = is_gather ? y : x, &share = is_gather ? x : y;
  if (share.data != static_cast<const uint8_t*>(whole.data) + p.group.rank * share_bytes) check.no_overlap(y, x, false);
  const OnDevice where(x, enable_pdl);
  is_gather ? flashinfer::all_gather(p, where) : flashinfer::reduce_scatter(p, where);
  if (!kOnCuda) check_alive(check, p.group);  // the call has ended
}

void reduce_scatter(const Tensor& input, const Tensor& output, const Tensor& order, const Tensor& table,
                    std::optional<bool> enable_pdl) {
  run_on_shares(Check("reduce_scatter"), Collective::kReduceScatter, input, output, order, table, enable_pdl);
}

void all_gather(const Tensor& input, const Tensor& output, const Tensor& order, const Tensor& table,
                std::optional<bool> enable_pdl) {
  run_on_shares(Check("all_gather"), Collective::kAllGather, input, output, order, table, enable_pdl);
}

FLASHINFER_LIBRARY(m) {
  m.impl("allreduce", box<binding::allreduce>);
  m.impl("allreduce_norm", box<allreduce_norm>);
  m.impl("allreduce_norm_quant", box<allreduce_norm_quant>);
  m.impl("reduce_scatter", box<binding::reduce_scatter>);
  m.impl("all_gather", box<binding::all_gather>);
  m.impl("moe_dispatch", box<binding::moe_dispatch>);
  m.impl("moe_combine", box<binding::moe_combine>);
}

}  // namespace
}  // namespace flashinfer::binding
