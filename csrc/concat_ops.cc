// Operator that concatenates the parts of MLA's keys.
#include "binding/binding.h"

#include <flashinfer/common/concat_ops.h>

namespace flashinfer::binding {
namespace {

constexpr int64_t kPieceBytes = 16;  // unit of the parts of a row

void concat_mla_k_out(const Tensor& k, const Tensor& k_nope, const Tensor& k_rope) {
  const Check check("concat_mla_k");
  const View to(k, "k"), nope(k_nope, "k_nope"), rope(k_rope, "k_rope");
  check.rank(to, 3, 3);
  check.dtype(to, {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2});
  const int64_t width = size_of(to.dtype);
  for (const View* arg : {&nope, &rope}) {
    check.rank(*arg, 3, 3);
    check.same_dtype(*arg, to);
    check.same_device(*arg, to);
  }
  check.shape(nope, {to.size(0), to.size(1), -1});
  check.shape(rope, {to.size(0), 1, -1});
  if (nope.size(2) + rope.size(2) != to.size(2))
    check.fail(to, "got " + std::to_string(to.size(2)) + " elements in a head, wanted " + std::to_string(nope.size(2)) +
                       " of k_nope and " + std::to_string(rope.size(2)) + " of k_rope");
  for (const View* arg : {&nope, &rope})
    if (arg->size(2) * width % kPieceBytes != 0)
      check.fail(*arg, "got " + std::to_string(arg->size(2) * width) + " bytes in a head, wanted a multiple of 16");
  for (const View* arg : {&to, &nope, &rope}) {
    check.last_contiguous(*arg);
    check.aligned(*arg);
  }
  check.writable(to);
  check.no_overlap(to, nope, false);
  check.no_overlap(to, rope, false);
  if (to.numel == 0) return;
  if (to.size(1) * to.size(2) > INT32_MAX) check.fail(to, "got a token of more than 2^31 elements");
  const auto bytes = [&](const View& arg, int64_t dim) { return arg.size(dim) > 1 ? arg.stride(dim) * width : 0; };
  const ConcatMlaParams params{.k = static_cast<char*>(to.data),
                               .nope = static_cast<const char*>(nope.data),
                               .rope = static_cast<const char*>(rope.data),
                               .k_token_stride = bytes(to, 0),
                               .k_head_stride = bytes(to, 1),
                               .nope_token_stride = bytes(nope, 0),
                               .nope_head_stride = bytes(nope, 1),
                               .rope_token_stride = bytes(rope, 0),
                               .nope_bytes = nope.size(2) * width,
                               .rope_bytes = rope.size(2) * width,
                               .tokens = to.size(0),
                               .heads = to.size(1)};
  const OnDevice where(to);
  concat_mla_k(params, where);
}

FLASHINFER_LIBRARY(m) { m.impl("concat_mla_k", box<concat_mla_k_out>); }

}  // namespace
}  // namespace flashinfer::binding
