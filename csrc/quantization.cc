// Operators of the quantization family.
#include "binding/binding.h"

#include <tuple>

#include <flashinfer/common/quantization.h>

namespace flashinfer::binding {
namespace {

void check_booleans(const Check& check, const View& x) {
  check.rank(x, 1, 1);
  check.dtype(x, {DType::kBool, DType::kUInt8});
  check.contiguous(x);
}

PackParams pack_params(const View& x, const View& packed, bool little) {
  return {.x = static_cast<const uint8_t*>(x.data),
          .packed = static_cast<uint8_t*>(packed.data),
          .n = x.numel,
          .num_bytes = packed.numel,
          .factor = little ? kLittleFactor : kBigFactor};
}

Tensor packbits(const Tensor& x, bool little) {
  const Check check("packbits");
  const View booleans(x, "x");
  check_booleans(check, booleans);
  const int64_t size = (booleans.numel + 7) / 8;
  Tensor packed = empty(&size, 1, x, aoti_torch_dtype_uint8());
  flashinfer::pack_bits(pack_params(booleans, View(packed, "packed"), little), OnDevice(booleans));
  return packed;
}

std::tuple<Tensor, Tensor> segment_packbits(const Tensor& x, const Tensor& indptr, bool little) {
  const Check check("segment_packbits");
  const View booleans(x, "x"), starts(indptr, "indptr");
  check_booleans(check, booleans);
  check.rank(starts, 1, 1);
  check.dtype(starts, {DType::kInt32});
  check.same_device(starts, booleans);
  check.contiguous(starts);
  check.aligned(starts);
  if (starts.numel < 1) check.fail(starts, "got shape [0], wanted [num_segments + 1]");
  if (booleans.numel > INT32_MAX) check.fail(booleans, "got more than 2147483647 elements");
  // Allocate for the worst case, in which every segment begins a byte with one boolean: the sizes are on the
  // device.
  const int64_t num_segments = starts.numel - 1, size = (booleans.numel + 7 * num_segments) / 8;
  Tensor packed = empty(&size, 1, x, aoti_torch_dtype_uint8()), packed_indptr = empty_like(starts, indptr);
  const SegmentPackParams params{.pack = pack_params(booleans, View(packed, "packed"), little),
                                 .indptr = static_cast<const int32_t*>(starts.data),
                                 .packed_indptr = static_cast<int32_t*>(View(packed_indptr, "packed_indptr").data),
                                 .num_segments = num_segments};
  flashinfer::segment_pack_bits(params, OnDevice(booleans));
  return {std::move(packed), std::move(packed_indptr)};
}

FLASHINFER_LIBRARY(m) {
  m.impl("packbits", box<packbits>);
  m.impl("segment_packbits", box<segment_packbits>);
}

}  // namespace
}  // namespace flashinfer::binding
