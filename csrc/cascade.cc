// Operators of the cascade family.
#include "binding/binding.h"

#include <tuple>

#include <flashinfer/common/cascade.h>

namespace flashinfer::binding {
namespace {

// Check v [seq, heads, dim] and s [seq, heads] of one state, or of states along dimension 1 of both.
void check_states(const Check& check, const View& v, const View& s, bool many) {
  check.rank(v, many ? 4 : 3, many ? 4 : 3);
  check.floating(v);
  check.last_contiguous(v);
  check.aligned(v);
  check.dtype(s, {DType::kFloat32});
  if (many)
    check.shape(s, {v.size(0), v.size(1), v.size(2)});
  else
    check.shape(s, {v.size(0), v.size(1)});
  check.same_device(s, v);
  check.aligned(s);
  if (v.size(0) * v.size(-2) > INT32_MAX) check.fail(v, "got more than 2147483647 rows");
}

void check_like(const Check& check, const View& other, const View& v) {
  check.same_shape(other, v);
  check.same_dtype(other, v);
  check.same_device(other, v);
}

States states(const View& v, const View& s) {
  return {.v = v.data,
          .s = static_cast<float*>(s.data),
          .v_seq = v.stride(0),
          .v_head = v.stride(-2),
          .s_seq = s.stride(0),
          .s_head = s.stride(-1)};
}

MergeStateParams merge_params(const View& v_a, const View& s_a, const View& v_b, const View& s_b, const View& v,
                              const View& s) {
  return {.a = states(v_a, s_a),
          .b = states(v_b, s_b),
          .out = states(v, s),
          .mask = nullptr,
          .seq_len = v.size(0),
          .num_heads = v.size(1),
          .head_dim = v.size(2),
          .dtype = v.dtype};
}

std::tuple<Tensor, Tensor> merge_state(const Tensor& v_a, const Tensor& s_a, const Tensor& v_b, const Tensor& s_b) {
  const Check check("merge_state");
  const View va(v_a, "v_a"), sa(s_a, "s_a"), vb(v_b, "v_b"), sb(s_b, "s_b");
  check_states(check, va, sa, false);
  check_like(check, vb, va);
  check_states(check, vb, sb, false);
  Tensor v = empty_like(va, v_a), s = empty_like(sa, s_a);
  flashinfer::merge_state(merge_params(va, sa, vb, sb, View(v, "v"), View(s, "s")), OnDevice(va));
  return {std::move(v), std::move(s)};
}

void merge_state_in_place(const Tensor& v, const Tensor& s, const Tensor& v_other, const Tensor& s_other,
                          const std::optional<Tensor>& mask) {
  const Check check("merge_state_in_place");
  const View va(v, "v"), sa(s, "s"), vb(v_other, "v_other"), sb(s_other, "s_other");
  check_states(check, va, sa, false);
  check_like(check, vb, va);
  check_states(check, vb, sb, false);
  check.writable(va);
  check.writable(sa);
  for (const View* arg : {&sa, &vb, &sb}) check.no_overlap(va, *arg, false);
  for (const View* arg : {&vb, &sb}) check.no_overlap(sa, *arg, false);
  MergeStateParams params = merge_params(va, sa, vb, sb, va, sa);
  if (mask) {
    const View rows(*mask, "mask");
    check.dtype(rows, {DType::kBool, DType::kUInt8});
    check.shape(rows, {va.size(0)});
    check.same_device(rows, va);
    check.contiguous(rows);
    check.no_overlap(va, rows, false);
    check.no_overlap(sa, rows, false);
    params.mask = static_cast<const uint8_t*>(rows.data);
  }
  flashinfer::merge_state(params, OnDevice(va));
}

std::tuple<Tensor, Tensor> merge_states(const Tensor& v, const Tensor& s) {
  const Check check("merge_states");
  const View in(v, "v"), lse(s, "s");
  check_states(check, in, lse, true);
  const int64_t shape[] = {in.size(0), in.size(2), in.size(3)};
  Tensor merged = empty(shape, 3, v), merged_lse = empty(shape, 2, s);
  const MergeStatesParams params{.in = states(in, lse),
                                 .out = states(View(merged, "v"), View(merged_lse, "s")),
                                 .v_state = in.stride(1),
                                 .s_state = lse.stride(1),
                                 .num_states = in.size(1),
                                 .seq_len = in.size(0),
                                 .num_heads = in.size(2),
                                 .head_dim = in.size(3),
                                 .dtype = in.dtype};
  flashinfer::merge_states(params, OnDevice(in));
  return {std::move(merged), std::move(merged_lse)};
}

FLASHINFER_LIBRARY(m) {
  m.impl("merge_state", box<merge_state>);
  m.impl("merge_state_in_place", box<merge_state_in_place>);
  m.impl("merge_states", box<merge_states>);
}

}  // namespace
}  // namespace flashinfer::binding
