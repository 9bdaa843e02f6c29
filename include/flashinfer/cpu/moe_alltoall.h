// All-to-all of experts on the CPU between processes that share memory; definitions in common/moe_alltoall.h.
#pragma once

#include <cstring>
#include <limits>
#include <vector>

#include <flashinfer/common/moe_alltoall.h>
#include <flashinfer/cpu/allreduce.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/lanes.h>
#include <flashinfer/cpu/simd/vec.h>

namespace flashinfer::cpu {

inline void moe_dispatch(const MoeDispatchParams& p) {
  const CommGroup& group = p.call.group;
  const RankCall call(p.call);
  const int64_t most = p.call.rows;
  if (!call.failed()) {
    parallel_rows(most, static_cast<int64_t>(p.call.row_bytes) * group.ranks, [&](int64_t first, int64_t last) {
      for (int64_t token = first; token < last; ++token) {
        uint32_t ranks = 0;
        for (int k = 0; token < p.tokens && k < p.top_k; ++k)
          p.targets[token * p.top_k + k] = next_target(p, token, k, ranks);
        const int64_t row = group.rank * most + token;
        for (int rank = 0; rank < group.ranks; ++rank) {
          uint8_t* region = region_of(group, rank);
          const bool is_sent = ranks >> rank & 1;
          reinterpret_cast<int32_t*>(region)[row] = is_sent;
          for (int i = 0; i < p.count; ++i) {
            const MoePayload& payload = p.payloads[i];
            uint8_t* to = region + payload.offset + row * payload.row_bytes;
            if (is_sent) {
              std::memcpy(to, static_cast<const uint8_t*>(payload.rows) + token * payload.row_bytes, payload.row_bytes);
            } else if (i == p.ids) {
              for (int64_t at = 0; at < payload.row_bytes; at += 4) std::memcpy(to + at, &p.invalid_id, 4);
            }
          }
        }
      }
    });
  }
  call.send_headers();
  call.finish();
}

template <typename T>
void moe_combine(const MoeCombineParams& p) {
  const CommGroup& group = p.call.group;
  const RankCall call(p.call);
  const int64_t most = p.call.rows, n = p.call.hidden, bytes = p.call.row_bytes;
  if (!call.failed()) {
    const auto* sent = reinterpret_cast<const int32_t*>(region_of(group, group.rank));
    parallel_rows(group.ranks * most, bytes, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        if (!sent[row]) continue;
        uint8_t* area = region_of(group, static_cast<int>(row / most)) + p.offset;
        std::memcpy(area + (group.rank * most + row % most) * bytes,
                    static_cast<const uint8_t*>(p.call.input) + row * bytes, bytes);
      }
    });
  }
  call.send_headers();
  call.finish();
  const float start = call.failed() ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  const auto* area = reinterpret_cast<const T*>(region_of(group, group.rank) + p.offset);
  parallel_rows(p.tokens, bytes * p.top_k, [&](int64_t first, int64_t last) {
    std::vector<float> sum(n);
    for (int64_t token = first; token < last; ++token) {
      std::fill(sum.begin(), sum.end(), start);
      for (int k = 0; k < p.top_k; ++k) {
        const int32_t target = p.targets[token * p.top_k + k];
        if (target < 0) continue;
        const T* from = area + (target * most + token) * n;
        for_lanes(n,
                  [&](int64_t i, int count) { store(&sum[i], load(&sum[i], count) + load(from + i, count), count); });
      }
      T* out = static_cast<T*>(p.call.out) + token * n;
      for_lanes(n, [&](int64_t i, int count) { store(out + i, load(&sum[i], count), count); });
    }
  });
}

}  // namespace flashinfer::cpu
