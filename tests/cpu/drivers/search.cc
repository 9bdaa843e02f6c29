// Binary search in tables of begins, against a linear search. Tables may repeat begins and start after 0.
#include <flashinfer/common/rope.h>
#include <flashinfer/common/search.h>

#include "harness.h"

using namespace driver;

void run() {
  for (int round = 0; round < 50; ++round) {
    const int count = drawn_int(1, 40);
    std::vector<int32_t> begins = {drawn_int(0, 3)};
    for (int i = 1; i <= count; ++i) begins.push_back(begins.back() + drawn_int(0, 2) * drawn_int(0, 3));
    for (int low = 0; low < count; low += 3) {
      for (int64_t x = -1; x <= begins.back() + 1; ++x) {
        int want = low;
        for (int i = low; i < count; ++i)
          if (begins[i] <= x) want = i;
        bool first_read = false;
        const int got = last_at_or_before(low, count, x, [&](int i) {
          first_read |= i == low;
          return begins[i];
        });
        check("last_at_or_before", x, got, want, 0);
        check("begin(low)", x, first_read, 0, 0);
      }
    }
    check("empty", 0, last_at_or_before(0, 0, 5, [](int) { return 0; }), 0, 0);
    for (int32_t& one : begins) one = drawn_int(-100, 100);
    const int any = last_at_or_before(0, count, 7, [&](int i) { return begins[i]; });
    check("a table that falls", count, any >= 0 && any < count, 1, 0);
  }
  for (int round = 0; round < 50; ++round) {
    const int count = drawn_int(0, 9);
    std::vector<int32_t> indptr = {0};
    std::vector<int64_t> offsets;
    for (int r = 0; r < count; ++r) {
      indptr.push_back(indptr.back() + drawn_int(0, 1) * drawn_int(0, 9));
      offsets.push_back(drawn_int(0, 1000));
    }
    RopeParams p{};
    p.with_requests = true, p.num_requests = count;
    p.indptr = {indptr.data(), false}, p.offsets = {offsets.data(), true};
    for (int r = 0; r < count; ++r)
      for (int64_t t = indptr[r]; t < indptr[r + 1]; ++t)
        check("position", t, static_cast<double>(p.position(t)), static_cast<double>(offsets[r] + t - indptr[r]), 0);
    for (int64_t t = indptr.back(); t < indptr.back() + 3; ++t)
      check("after the last request", t, static_cast<double>(p.position(t)), 0, 0);
  }
}
