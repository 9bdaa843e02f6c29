// Copies from tensors to shared memory: rows of a tile, and stages of columns.
#pragma once

#include <cstdint>

#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cuda/attention/backward/rows.cuh>
#include <flashinfer/cuda/attention/backward/shape.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/tile/swizzle.cuh>

namespace flashinfer::cuda {

// Start the copy of kCount rows of a head from token `first` on, with zeros after row `count` and column
// `dim`. Eight threads share a row, 128 bytes of it at a time.
template <typename T, int kBytes, int kCount, int kThreads>
__device__ __forceinline__ void load_rows(uint32_t to, const HeadRows& from, int64_t first, int32_t head, int32_t count,
                                          int32_t dim) {
  constexpr int kStep = kThreads / 8;
  static_assert(kBytes % 128 == 0 && kCount % kStep == 0 && kStep % 8 == 0);
  const int row = static_cast<int>(threadIdx.x) / 8, chunk = static_cast<int>(threadIdx.x) % 8;
  const T* at = from.at<const T>(first + row, head) + chunk * 8;
  to = Swizzle<kBytes>::chunk(Swizzle<kBytes>::row(to, row), chunk);
#pragma unroll
  for (int step = 0; step < kCount; step += kStep, at += kStep * from.row) {
#pragma unroll
    for (int part = 0; part < kBytes / 128; ++part)
      ptx::cp_async_16(to + step * kBytes + part * 128, at + part * 64,
                       row + step < count && chunk * 8 + part * 64 < dim);
  }
}

// The columns of a CTA, stage by stage.
template <typename S>
struct BackwardColumns {
  using T = typename S::T;
  const PrefillBackwardParams& p;
  const BackwardEntry& entry;
  int32_t head, begin, end;  // columns of the CTA; the head advances if columns are queries
  int32_t next;              // first column of the next stage

  __device__ __forceinline__ const HeadRows& qk() const { return S::kOfKeys ? p.q : p.k; }
  __device__ __forceinline__ const HeadRows& vo() const { return S::kOfKeys ? p.grad : p.v; }

  // Start the copies of the next stage.
  __device__ __forceinline__ void load(uint32_t stage) {
    const int32_t count = (S::kOfKeys ? entry.qo_len : entry.kv_len) - next;
    const int64_t first = int64_t{S::kOfKeys ? entry.qo_start : entry.kv_start} + next;
    load_rows<T, S::kQKRow, S::kColumns, S::kThreads>(stage, qk(), first, head, count, p.head_dim_qk);
    load_rows<T, S::kVORow, S::kColumns, S::kThreads>(stage + S::kColumns * S::kQKRow, vo(), first, head, count,
                                                      p.head_dim_vo);
    if (S::kOfKeys && threadIdx.x < S::kColumns) {
      const int64_t row = (first + threadIdx.x) * p.num_qo_heads + head;
      ptx::cp_async_8(stage + S::kTilesBytes + threadIdx.x * sizeof(BackwardRow), rows_in_memory(p) + row,
                      static_cast<int32_t>(threadIdx.x) < count);
    }
  }

  __device__ __forceinline__ void advance() {
    next += S::kColumns;
    if (S::kOfKeys && next >= end) next = begin, ++head;
  }
};

}  // namespace flashinfer::cuda
