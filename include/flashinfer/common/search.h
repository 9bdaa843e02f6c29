// Binary search in a table of begins: the request, expert or segment that contains an element.
#pragma once

#include <flashinfer/common/rows.h>

namespace flashinfer {

// Return the last i of [low, high) with begin(i) <= x, or `low` if there is none. begin(low) is not read.
// `begin` must not fall; for any other table the search still ends, at some i of [low, high).
template <typename Index, typename X, typename Begin>
FLASHINFER_HD Index last_at_or_before(Index low, Index high, X x, const Begin& begin) {
  while (high - low > 1) {
    const Index middle = (low + high) / 2;
    (begin(middle) <= x ? low : high) = middle;
  }
  return low;
}

}  // namespace flashinfer
