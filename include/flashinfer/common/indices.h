// Indices of either width that torch uses.
#pragma once

#include <cstdint>

#include <flashinfer/common/rows.h>

namespace flashinfer {

struct Indices {
  const void* data;  // null: no indices
  bool wide;

  FLASHINFER_HD int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

}  // namespace flashinfer
