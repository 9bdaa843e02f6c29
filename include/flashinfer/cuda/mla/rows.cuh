// The rows of a tile of multi-head latent attention: heads of query tokens, packed. Their visible keys, and
// the destination of their results.
#pragma once

#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/mla.h>
#include <flashinfer/cuda/tile/convert.cuh>

namespace flashinfer::cuda {

struct MlaRows {
  const MlaParams& params;
  const WorkItem& item;
  int32_t count;  // number of existing rows

  __device__ __forceinline__ MlaRows(const MlaParams& p, const WorkItem& i)
      : params(p), item(i), count(min(p.tile_rows, i.qo_len * static_cast<int32_t>(p.group.divisor) - i.row_start)) {}

  // Finds a row's query of the request, and its head.
  __device__ __forceinline__ void locate(int row, int32_t& query, int32_t& head) const {
    uint32_t quotient, rest;
    params.group.divmod(static_cast<uint32_t>(item.row_start + row), quotient, rest);
    query = static_cast<int32_t>(quotient), head = static_cast<int32_t>(rest);
  }

  // Returns the end of the item's keys that the row sees.
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

  // Writes m and l of a partial state, or the lse. m is `m` times the scale, `l` the sum of P.
  __device__ __forceinline__ void write_softmax(int row, float m, float l) const {
    const float base = l == 0 ? 0.0f : m * params.sm_scale_log2;  // the product that P was computed with
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
