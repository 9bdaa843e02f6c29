// Epilogue: write a warpgroup's registers to outputs, or to partial states if a tile's keys are split.
#pragma once

#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/params.h>
#include <flashinfer/attention/sinks.h>
#include <flashinfer/attention/variant.h>
#include <flashinfer/cuda/attention/output.cuh>
#include <flashinfer/cuda/attention/sm90/load.cuh>
#include <flashinfer/cuda/attention/sm90/rows.cuh>
#include <flashinfer/cuda/attention/sm90/softmax.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/stmatrix.cuh>
#include <flashinfer/cuda/ptx/tma.cuh>

namespace flashinfer::cuda::sm90 {

template <typename Variant, typename S, typename P>
struct WarpgroupOutput {
  const P& params;
  const TensorMaps& maps;
  const Shared<S>& shared;
  const Work& work;
  const Variant& variant;
  const int group;

  // Return false if a copy of all 64 rows would write rows of the next request, or of the next tile.
  __device__ __forceinline__ bool owns_all_rows() const {
    const auto heads = static_cast<int32_t>(params.group.divisor);
    const int32_t end = work.row_start + 64 * (group + 1);
    return work.slot < 0 && end <= work.qo_len * heads && end <= work.row_start + params.tile_rows && 64 % heads == 0;
  }

  // Normalise O unless it is a partial state. Write the lse, or m and l.
  __device__ __forceinline__ void finish(float (&o)[S::kDV / 2], Softmax<S::kFp8>& softmax) const {
    const WarpRows<S> rows = warp_rows<S>(params, work);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float base = softmax.base(half), sum = Variant::use_softmax ? quad_sum(softmax.sum[half]) : 0;
      const RowOutput<S> to(params, work, rows, rows.row(0, half));
      const float rescale = to.o ? add_sink<Variant>(params, to.qo_head, base, sum) : 1.0f;
      float normaliser = !Variant::use_softmax || work.slot >= 0 ? 1.0f
                         : Variant::normalises_output            ? rescale
                         : sum == 0                              ? 0.0f
                                                                 : rescale * math::ptx_rcp(sum);
      if (threadIdx.x % 4 == 0) to.store_softmax(base, sum);
      if (work.slot < 0) normaliser *= params.o_scale;
      if constexpr (S::kFp8) normaliser *= head_scale<S>(params, rows, half, params.num_qo_heads);
#pragma unroll
      for (int i = 2 * half; i < S::kDV / 2; i += i % 2 == 0 ? 1 : 3) {
        o[i] *= normaliser;
        if constexpr (Variant::transforms_output) {
          if (to.o) o[i] = transform_output(params, variant, o[i], work.batch, to.qo_idx, to.qo_head, base, sum);
        }
      }
    }
  }

  // Store row by row, two elements at a time.
  __device__ __forceinline__ void store_rows(const float (&o)[S::kDV / 2]) const {
    const WarpRows<S> rows = warp_rows<S>(params, work);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowOutput<S> to(params, work, rows, rows.row(0, half));
      const int column = 2 * static_cast<int>(threadIdx.x % 4);
      if (to.partial) {
#pragma unroll
        for (int n = 0; n < S::kNOut; ++n)
          *reinterpret_cast<float2*>(to.partial + 8 * n + column) = {o[4 * n + 2 * half], o[4 * n + 2 * half + 1]};
      } else if (to.o) {
#pragma unroll
        for (int n = 0; n < S::kNOut; ++n)
          *reinterpret_cast<uint32_t*>(to.o + 8 * n + column) =
              pack<typename S::DTypeO>(o[4 * n + 2 * half], o[4 * n + 2 * half + 1]);
      }
    }
  }

  // Store through shared memory, with one TMA copy per chunk of 64 columns.
  __device__ __forceinline__ void store_tile(const float (&o)[S::kDV / 2]) const {
    using O = typename S::DTypeO;
    constexpr int kColumns = S::kOutputColumns;
    const bool first_thread = threadIdx.x % 128 == 0;
    const uint32_t to = shared.output(group);
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, right = threadIdx.x % 32 / 16;
    const auto token = work.qo_start + static_cast<int32_t>(params.group.div(work.row_start + 64 * group));
#pragma unroll
    for (int first = 0; first < S::kDV; first += kColumns) {
      if (first_thread) ptx::bulk_wait_read<0>();  // of the copy before
      sync();
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        const float* from = o + first / 2 + 8 * i;
        ptx::stmatrix_x4(to + S::Outputs::unit(row, 2 * i + right), pack<O>(from[0], from[1]),
                         pack<O>(from[2], from[3]), pack<O>(from[4], from[5]), pack<O>(from[6], from[7]));
      }
      ptx::fence_proxy_async();
      sync();
      if (first_thread) {
#pragma unroll
        for (int chunk = 0; chunk < kColumns / 64; ++chunk)
          ptx::tma_store(&maps.o, to + chunk * S::Outputs::kChunkBytes, first + chunk * 64, 0, token, work.head);
        ptx::bulk_commit();
      }
    }
  }

  __device__ __forceinline__ void write(float (&o)[S::kDV / 2], Softmax<S::kFp8>& softmax) const {
    finish(o, softmax);
    if (owns_all_rows()) {
      store_tile(o);
    } else {
      store_rows(o);
    }
  }

 private:
  __device__ __forceinline__ void sync() const { ptx::named_barrier<128>(1 + group); }
};

}  // namespace flashinfer::cuda::sm90
