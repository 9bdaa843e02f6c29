// Grouped GEMM for GPUs from sm_80 on: persistent CTAs loop over tiles, whose number only the device knows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <flashinfer/common/dispatch.h>
#include <flashinfer/cuda/gemm/load.cuh>
#include <flashinfer/cuda/gemm/sums.cuh>
#include <flashinfer/cuda/host/kernel.cuh>

namespace flashinfer::cuda {

// Store two adjacent results, or only the first without has_second. as_pair: alignment allows one store for
// both.
template <typename T>
__device__ __forceinline__ void store_results(T* to, float first, float second, bool has_second, bool as_pair) {
  if (as_pair && has_second) {
    if constexpr (__is_same(T, float)) {
      *reinterpret_cast<float2*>(to) = {first, second};
    } else {
      *reinterpret_cast<uint32_t*>(to) = pack<T>(first, second);
    }
    return;
  }
  to[0] = from_float<T>(first);
  if (has_second) to[1] = from_float<T>(second);
}

// Epilogue: multiply by the scale factors that do not depend on k and by row_scale, then store.
template <typename Shape, typename Sums>
__device__ __forceinline__ void write_tile(const GemmParams& p, const GemmSettings& settings, const GemmTile& tile,
                                           Sums& sums, uint32_t factors) {
  sums.for_pairs([&](int row, int column, float first, float second) {
    const int64_t at_row = tile.row + row, at_column = tile.column + column;
    if (at_row >= tile.end || at_column >= p.n) return;
    if (!Shape::kScaled) {
      const float by = ptx::load_shared_float(factors + row * 4);
      first *= by * ptx::load_shared_float(factors + (128 + column) * 4);
      second *= by * ptx::load_shared_float(factors + (129 + column) * 4);
    }
    if (p.row_scale) first *= p.row_scale[at_row], second *= p.row_scale[at_row];
    const int64_t at = p.out_layout.offset(at_row) + at_column;
    const bool has_second = at_column + 1 < p.n;
    if (p.out_dtype == DType::kFloat32) {
      store_results(static_cast<float*>(p.out) + at, first, second, has_second, settings.out_pairs);
    } else if (p.out_dtype == DType::kFloat16) {
      store_results(static_cast<half_t*>(p.out) + at, first, second, has_second, settings.out_pairs);
    } else {
      store_results(static_cast<bfloat16_t*>(p.out) + at, first, second, has_second, settings.out_pairs);
    }
  });
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kRows <= 16 ? 2 : 1)
    grouped_gemm_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ GemmSettings settings) {
  extern __shared__ uint8_t raw[];
  using Sums = std::conditional_t<Shape::kFloat, FloatSums<Shape>, TensorSums<Shape>>;
  const uint32_t shared = (ptx::shared_address(raw) + 127) & ~127u;
  wait_for_inputs();
  launch_dependents();
  GemmTiles<Shape::kRows, Shape::kColumns> tiles(p, settings.column_tiles);
  const int64_t block = Shape::kScaled ? p.scale_depth : p.k;  // elements of k that share a factor
  uint32_t stage = 0;
  GemmTile tile;
  for (int64_t number = blockIdx.x; tiles.find(number, tile); number += gridDim.x) {
    GemmLoader<Shape> loader(p, settings, tile);
    Sums sums, part;
    sums.clear();
    if constexpr (Shape::kScaled) part.clear();
    int64_t k = 0, blocks = 0,
            end = block < p.k ? block : p.k;  // first element of the step, its block, and the block's end
    loader.load(0, end, 0);
    // A do-while loop, because write_tile() reads the factors of a stage even if k is 0.
    do {
      stage ^= 1;
      const uint32_t stage_start = shared + stage * Shape::kStageBytes;
      loader.store(stage_start);
      __syncthreads();
      k = k + Shape::kDepth < end ? k + Shape::kDepth : end;
      const bool whole = k == end;
      if (whole) end = end + block < p.k ? end + block : p.k, ++blocks;
      if (k < p.k) loader.load(k, end, Shape::kScaled ? blocks : 0);
      if constexpr (Shape::kScaled) {
        part.multiply(stage_start);
        if (whole) sums.add(part, stage_start + Shape::kFactorsAt), part.clear();
      } else {
        sums.multiply(stage_start);
      }
    } while (k < p.k);
    write_tile<Shape>(p, settings, tile, sums, shared + stage * Shape::kStageBytes + Shape::kFactorsAt);
  }
}

// Return true if alignment allows accesses of `bytes` bytes to all rows of an operand.
inline bool allows_vectors(const void* data, std::initializer_list<int64_t> strides, int64_t element, int64_t bytes) {
  bool fits = reinterpret_cast<uintptr_t>(data) % bytes == 0;
  for (const int64_t stride : strides) fits = fits && stride * element % bytes == 0;
  return fits;
}

template <typename Shape>
void launch_grouped_gemm(const GemmParams& p, const Launch& where) {
  static PerDevice<int> found;
  const int blocks = found.get(where.device, [](int device) {
    const int resident =
        Kernel<grouped_gemm_kernel<Shape>>::resident_ctas(device, Shape::kThreads, Shape::kSharedBytes);
    return std::max(resident, device_info(device).num_sms);
  });
  const Rows &a = p.a_layout, &out = p.out_layout;
  constexpr int64_t kA = sizeof(typename Shape::A), kB = sizeof(typename Shape::B);
  const int64_t step = Shape::kScaled ? p.scale_depth : 0, column_tiles = (p.n - 1) / Shape::kColumns + 1;
  if (column_tiles > INT32_MAX) throw_value_error("grouped_gemm: b: got too many columns, wanted fewer than 2^38");
  const GemmSettings settings{
      static_cast<int32_t>(column_tiles),
      allows_vectors(p.a, {a.outer_stride, a.middle_stride, a.inner_stride, step}, kA, Shape::kChunk * kA),
      allows_vectors(p.b, {p.b_matrix_stride, Shape::kKMajor ? p.b_stride_n : p.b_stride_k, Shape::kKMajor ? step : 0},
                     kB, Shape::kChunk * kB),
      allows_vectors(p.out, {out.outer_stride, out.middle_stride, out.inner_stride}, size_of(p.out_dtype),
                     2 * size_of(p.out_dtype))};
  // Only the device knows the sizes of the groups. Each group adds at most one partial row of tiles.
  const int64_t max_tiles = (p.m / Shape::kRows + std::min(p.num_groups, p.m)) * column_tiles;
  Kernel<grouped_gemm_kernel<Shape>>::launch(dim3(static_cast<unsigned>(std::min<int64_t>(blocks, max_tiles))),
                                             dim3(Shape::kThreads), Shape::kSharedBytes, where, p, settings);
}

// Choose the number of rows of a tile by the average size of a group.
template <typename TA, typename TB, bool kKMajor, bool kScaled>
void launch_grouped_gemm(const GemmParams& p, const Launch& where) {
  if (p.m / p.num_groups <= 16) return launch_grouped_gemm<GemmShape<TA, TB, 16, kKMajor, kScaled>>(p, where);
  launch_grouped_gemm<GemmShape<TA, TB, 128, kKMajor, kScaled>>(p, where);
}

// Launch for types without block scales. Their b may have either layout.
template <typename T>
void launch_grouped_gemm_by_layout(const GemmParams& p, const Launch& where) {
  if (p.b_stride_k != 1) return launch_grouped_gemm<T, T, false, false>(p, where);
  launch_grouped_gemm<T, T, true, false>(p, where);
}

}  // namespace flashinfer::cuda
