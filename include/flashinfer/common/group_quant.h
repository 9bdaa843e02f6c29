// Quantisation of groups of a row to 8 bits with a scale for each group: parameters of the kernels.
#pragma once

#include <cstdint>
#include <cstring>

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>

namespace flashinfer {

// scale = max(amax of the group, eps) / largest, output = x / scale, clamped to [-largest, largest]. largest
// is 448 in e4m3, 127 in int8. If power_of_two, the scale is the next power of two from there.
struct GroupQuantParams {
  const void* input;                    // [num_rows, num_groups * group_size]
  void* output;                         // the same shape
  float* scale;                         // [num_rows, num_groups]
  int64_t input_stride, output_stride;  // of rows, whose elements are contiguous
  int64_t scale_row_stride, scale_group_stride;
  int64_t num_rows, num_groups, group_size;
  float eps;
  bool power_of_two;
  DType dtype, output_dtype;

  FLASHINFER_HD float largest() const { return output_dtype == DType::kInt8 ? 127.0f : kMaxE4M3; }

  FLASHINFER_HD float scale_of(float amax) const {
    const float scale = (amax > eps ? amax : eps) / largest();
    return power_of_two ? next_power_of_two(scale) : scale;
  }

  // Return the least power of two that is not below a positive number, or infinity.
  FLASHINFER_HD static float next_power_of_two(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7fffffu) & 0x7f800000u;
    memcpy(&x, &bits, 4);
    return x;
  }
};

struct Launch;
void group_quant(const GroupQuantParams& params, const Launch& launch);

}  // namespace flashinfer
