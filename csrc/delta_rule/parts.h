// Which part of a module's CUDA kernels is for an element type: behind the module's configuration, which names them.
#pragma once

#include <iterator>
#include <tuple>

namespace flashinfer {

// Calls body with the number of the part, a constant.
template <typename Body>
void with_part(DType dtype, const Body& body) {
  const int part = find_row(kParts, std::tuple<DType>(dtype));
  if (part < 0) throw_not_covered("dtype", to_string(dtype), kDtypeText);
  call_numbered<std::size(kParts)>(part, body);
}

}  // namespace flashinfer
