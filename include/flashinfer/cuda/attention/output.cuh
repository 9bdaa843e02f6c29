// Epilogue: write a CTA's sums to outputs, or to partial states if a tile's keys are split.
#pragma once

#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/params.h>
#include <flashinfer/attention/sinks.h>
#include <flashinfer/attention/variant.h>
#include <flashinfer/cuda/attention/fragments.cuh>
#include <flashinfer/cuda/attention/shape.cuh>
#include <flashinfer/cuda/attention/softmax.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

// The destination of a row's result: of all columns, or of those from first_column() on.
template <typename S>
struct RowOutput {
  typename S::DTypeO* o;    // null: no such row, or the row is a partial state
  float *partial, *lse;     // null: not written
  PartialSoftmax* softmax;  // m and l of a partial state
  int32_t qo_idx, qo_head;

  __device__ __forceinline__ RowOutput(const AttentionParams& params, const WorkItem& item, const WarpRows<S>& warp,
                                       int32_t row)
      : o(nullptr), partial(nullptr), lse(nullptr), softmax(nullptr) {
    if (row >= warp.end_row) return;
    warp.locate(row, qo_idx, qo_head);
    if (item.slot >= 0) {
      const int64_t at =
          (int64_t{item.slot} * params.num_kv_heads + warp.head) * params.slot_rows + row - item.row_start;
      partial = params.partial_o + at * S::HEAD_DIM_VO + first_column<S>();
      if (first_column<S>() == 0) softmax = params.partial_ml + at;
      return;
    }
    const int64_t token = int64_t{item.qo_start} + qo_idx;
    o = static_cast<typename S::DTypeO*>(params.o) + token * params.o_row + qo_head * params.o_head + first_column<S>();
    if (params.lse && first_column<S>() == 0) lse = params.lse + token * params.num_qo_heads + qo_head;
  }

  // Write the row's m and l to a partial state, or lse = m + log2(l).
  __device__ __forceinline__ void store_softmax(float m, float l) const {
    if (softmax) {
      *reinterpret_cast<float2*>(softmax) = {m, l};
    } else if (lse) {
      *lse = l == 0 ? -math::inf : m + math::ptx_log2(l);
    }
  }

  // Write columns from `column` on, multiplied by `share`. It is 1 for a partial state, which is not
  // normalised. m and l are the row's state for the variant.
  template <typename Variant, typename P, int kN>
  __device__ __forceinline__ void store_columns(const P& params, const Variant& variant, int32_t batch, int column,
                                                float (&values)[kN], float share, float m, float l) const {
#pragma unroll
    for (int i = 0; i < kN; ++i) values[i] *= share;
    if (partial) {
      store_vec(partial + column, Vec<float, kN>::from_floats(values));
    } else if (o) {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        values[i] *= params.o_scale;
        if constexpr (Variant::transforms_output)
          values[i] = transform_output(params, variant, values[i], batch, qo_idx, qo_head, m, l);
      }
      store_vec(o + column, Vec<typename S::DTypeO, kN>::from_floats(values));
    }
  }
};

// Write rows from a warp's registers.
template <typename Variant, typename S, typename P>
__device__ __forceinline__ void write_rows(const P& params, const Variant& variant, const WorkItem& item,
                                           const WarpRows<S>& warp, const Outputs<S>& o,
                                           const OnlineSoftmax<S>& softmax) {
#pragma unroll
  for (int m = 0; m < S::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowOutput<S> row(params, item, warp, warp.row(m, half));
      float base = softmax.base(m, half), sum = Variant::use_softmax ? quad_sum(softmax.sum[m][half]) : 0;
      const float rescale = row.o ? add_sink<Variant>(params, row.qo_head, base, sum) : 1.0f;
      const float share = row.partial ? 1.0f : normaliser_of<Variant>(sum, rescale);
#pragma unroll
      for (int pair = 0; pair < S::kNOut / 2; ++pair) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          float values[2];
          const int column = output_pair<S>(o[m][2 * pair], o[m][2 * pair + 1], half, pair, part, values);
          row.template store_columns<Variant>(params, variant, item.batch, column, values, share, base, sum);
        }
      }
      if (threadIdx.x % 4 == 0) row.store_softmax(base, sum);
    }
  }
}

// Store a group's partial states of 16 rows to shared memory: O as [kRows, kPartialStride], then m and l as
// [kRows, 2].
template <typename Variant, typename S>
__device__ __forceinline__ void store_sums(const Outputs<S>& o, const OnlineSoftmax<S>& softmax, float* sums,
                                           float* ml) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 8 * half + lane / 4;
#pragma unroll
    for (int pair = 0; pair < S::kNOut / 2; ++pair) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        float values[2];
        const int column = output_pair<S>(o[0][2 * pair], o[0][2 * pair + 1], half, pair, part, values);
        *reinterpret_cast<float2*>(sums + row * S::kPartialStride + column) = {values[0], values[1]};
      }
    }
    if constexpr (Variant::use_softmax) {
      const float sum = quad_sum(softmax.sum[0][half]);
      if (lane % 4 == 0) ml[2 * row] = sum == 0 ? -math::inf : softmax.base(0, half), ml[2 * row + 1] = sum;
    }
  }
}

// Merge the groups' partial states in their order, and write the result.
template <typename Variant, typename S, typename P>
__device__ __forceinline__ void write_groups(const P& params, const Variant& variant, const WorkItem& item,
                                             const WarpRows<S>& warp, const Outputs<S>& o,
                                             const OnlineSoftmax<S>& softmax, float* sums) {
  static_assert(S::kM == 1 && S::kRowWarps == 1, "a group is one warp with 16 rows");
  constexpr int kGroupFloats = S::kRows * S::kPartialStride, kColumns = S::kDV / 4;
  float* ml = sums + S::kKeyWarps * kGroupFloats;
  const int own = threadIdx.x / 32;
  __syncthreads();  // all tiles are finished: their memory is reused
  store_sums<Variant, S>(o, softmax, sums + own * kGroupFloats, ml + own * 2 * S::kRows);
  __syncthreads();
  for (int i = threadIdx.x; i < S::kRows * kColumns; i += S::kThreads) {
    const int row = i / kColumns, column = i % kColumns * 4;
    const RowOutput<S> to(params, item, warp, item.row_start + row);
    float max_m = -math::inf, sum_l = 0, values[4] = {};
    if constexpr (Variant::use_softmax) {
#pragma unroll
      for (int g = 0; g < S::kKeyWarps; ++g) max_m = fmaxf(max_m, ml[2 * (g * S::kRows + row)]);
    }
#pragma unroll
    for (int g = 0; g < S::kKeyWarps; ++g) {
      float share = 1;
      if constexpr (Variant::use_softmax) {
        const float base = ml[2 * (g * S::kRows + row)];
        share = base == -math::inf ? 0.0f : math::ptx_exp2(base - max_m);
        sum_l += share * ml[2 * (g * S::kRows + row) + 1];
      }
      const auto part = *reinterpret_cast<const float4*>(sums + g * kGroupFloats + row * S::kPartialStride + column);
      values[0] += share * part.x, values[1] += share * part.y, values[2] += share * part.z,
          values[3] += share * part.w;
    }
    const float rescale = to.o ? add_sink<Variant>(params, to.qo_head, max_m, sum_l) : 1.0f;
    const float normaliser = to.partial ? 1.0f : normaliser_of<Variant>(sum_l, rescale);
    to.template store_columns<Variant>(params, variant, item.batch, column, values, normaliser, max_m, sum_l);
    if (column == 0) to.store_softmax(max_m, sum_l);
  }
}

template <typename Variant, typename S, typename P>
__device__ __forceinline__ void write_outputs(const P& params, const Variant& variant, const WorkItem& item,
                                              const WarpRows<S>& warp, const Outputs<S>& o,
                                              const OnlineSoftmax<S>& softmax, uint8_t* shared) {
  if constexpr (S::kKeyWarps > 1) {
    write_groups<Variant, S>(params, variant, item, warp, o, softmax, reinterpret_cast<float*>(shared));
  } else {
    if (warp.active()) write_rows<Variant, S>(params, variant, item, warp, o, softmax);
  }
}

}  // namespace flashinfer::cuda
