// Rows of a tile of multi-head latent attention. A row is one head of one query token. They know their
// queries, their visible keys and the addresses of their results.
#pragma once

#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/mla.h>
#include <flashinfer/attention/sinks.h>
#include <flashinfer/cuda/tile/convert.cuh>

namespace flashinfer::cuda {

struct MlaRows {
  const MlaParams& params;
  const WorkItem& item;
  int32_t count;  // number of existing rows

  __device__ __forceinline__ MlaRows(const MlaParams& p, const WorkItem& i)
      : params(p), item(i), count(min(p.tile_rows, i.qo_len * static_cast<int32_t>(p.group.divisor) - i.row_start)) {}

  // Find the query token and the head of a row.
  __device__ __forceinline__ void locate(int row, int32_t& query, int32_t& head) const {
    uint32_t quotient, rest;
    params.group.divmod(static_cast<uint32_t>(item.row_start + row), quotient, rest);
    query = static_cast<int32_t>(quotient), head = static_cast<int32_t>(rest);
  }

  // Return the end of the keys of the item that the row sees.
  __device__ __forceinline__ int32_t end(int row) const {
    if (params.mask_mode != MaskMode::kCausal) return item.kv_end;
    const auto query = static_cast<int32_t>(params.group.div(static_cast<uint32_t>(item.row_start + row)));
    return min(item.kv_end, item.kv_len - item.qo_len + query + 1);
  }

  template <typename T>
  __device__ __forceinline__ const T* nope(int row) const {
    int32_t query, head;
    locate(row, query, head);
    return static_cast<const T*>(params.q) + (item.qo_start + int64_t{query}) * params.q_row + head * params.q_head;
  }
  template <typename T>
  __device__ __forceinline__ const T* pe(int row) const {
    int32_t query, head;
    locate(row, query, head);
    return static_cast<const T*>(params.q_pe) + (item.qo_start + int64_t{query}) * params.q_pe_row +
           head * params.q_pe_head;
  }
  template <typename T>
  __device__ __forceinline__ T* out(int row) const {
    int32_t query, head;
    locate(row, query, head);
    return static_cast<T*>(params.o) + (item.qo_start + int64_t{query}) * params.o_row + head * params.o_head;
  }
  __device__ __forceinline__ float* partial(int row) const {
    return params.partial_o + (int64_t{item.slot} * params.slot_rows + row) * kMlaCkv;
  }

  // Return m in base 2: the row maximum of S times the scale of softmax.
  __device__ __forceinline__ float base(float row_max, float l) const {
    return l == 0 ? 0.0f : row_max * params.sm_scale_log2;
  }

  // Add the row's sink to m in base 2 and to l, if the item is final. Return the factor that rescales O.
  __device__ __forceinline__ float add_sink(int row, float& base, float& l) const {
    if (params.maybe_sinks == nullptr || item.slot >= 0) return 1.0f;
    int32_t query, head;
    locate(row, query, head);
    return flashinfer::add_sink<MlaVariant>(params, head, base, l);
  }

  // Write m and l of a partial state, or the lse. `base` is m in base 2, `l` the sum of P.
  __device__ __forceinline__ void write_softmax(int row, float base, float l) const {
    if (item.slot >= 0) {
      *reinterpret_cast<float2*>(params.partial_ml + int64_t{item.slot} * params.slot_rows + row) = {base, l};
    } else if (params.lse) {
      int32_t query, head;
      locate(row, query, head);
      params.lse[(item.qo_start + int64_t{query}) * params.num_qo_heads + head] =
          l == 0 ? -math::inf : base + math::ptx_log2(l);
    }
  }
};

}  // namespace flashinfer::cuda
