// Grouped GEMM of 16-bit rows and MXFP4 matrices for GPUs from sm_80 on: persistent CTAs loop over tiles.
//
// With few rows the time is that of copying codes and scales, 4.25 bits per element. Copies of kStages - 1
// steps are in flight, and a small tile leaves room for four CTAs per SM. With many rows, expansion in
// registers and mma.sync are the limit: on an H100, 16-bit matrices are faster from 64 rows per matrix on,
// MXFP4 matrices with 16 or fewer.
#pragma once

#include <algorithm>
#include <cstdint>

#include <flashinfer/common/dispatch.h>
#include <flashinfer/cuda/gemm/mxfp4/tile.cuh>
#include <flashinfer/cuda/host/kernel.cuh>

namespace flashinfer::cuda {

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtas)
    mxfp4_gemm_kernel(const __grid_constant__ Mxfp4GemmParams p, int32_t column_tiles) {
  extern __shared__ uint8_t raw[];
  constexpr int kStages = Shape::kStages;
  const uint32_t shared = (ptx::shared_address(raw) + 127) & ~127u;
  wait_for_inputs();
  launch_dependents();
  const int steps = static_cast<int>(p.k / kMxfp4Depth);
  for (uint32_t number = blockIdx.x;; number += gridDim.x) {
    GemmTile found;
    // Construct GemmTiles for each tile: its state would need 20 registers in the mainloop.
    if (!GemmTiles<Shape::kRows, Shape::kColumns>(p, column_tiles).find(number, found)) return;
    const Mxfp4Tile tile{static_cast<int32_t>(found.row), static_cast<int32_t>(found.end),
                         static_cast<int32_t>(found.matrix), found.column};
    if (threadIdx.x == 0) tile.store(shared + Shape::kTileAt);
    const Mxfp4Copies<Shape> copies(p, tile, shared + Shape::kTableAt);
    Mxfp4Sums<Shape> sums;
#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) {
      if (step < steps) copies.start(shared + step * Shape::kStageBytes, step);
      ptx::cp_async_commit();
    }
    const uint32_t end = shared + kStages * Shape::kStageBytes;
    uint32_t stage = shared;
    for (int step = 0; step < steps; ++step) {
      ptx::cp_async_wait<kStages - 2>();
      __syncthreads();
      if (step + kStages - 1 < steps)
        copies.start((stage == shared ? end : stage) - Shape::kStageBytes, step + kStages - 1);
      ptx::cp_async_commit();
      sums.multiply(stage);
      stage = stage + Shape::kStageBytes == end ? shared : stage + Shape::kStageBytes;
    }
    sums.write(p, Mxfp4Tile::load(shared + Shape::kTileAt));
    __syncthreads();  // the next tile's first copies overwrite the last stages
  }
}

template <typename Shape>
void launch_mxfp4_gemm(const Mxfp4GemmParams& p, const Launch& where) {
  static PerDevice<int> found;
  const int ctas = found.get(where.device, [](int device) {
    const int resident = Kernel<mxfp4_gemm_kernel<Shape>>::resident_ctas(device, Shape::kThreads, Shape::kSharedBytes);
    return std::max(resident, device_info(device).num_sms);
  });
  const int64_t column_tiles = (p.n - 1) / Shape::kColumns + 1;
  // Only the device knows the sizes of the groups. Each group adds at most one partial row of tiles.
  const int64_t most = (p.m / Shape::kRows + std::min(p.num_groups, p.m)) * column_tiles;
  Kernel<mxfp4_gemm_kernel<Shape>>::launch(dim3(static_cast<unsigned>(std::min<int64_t>(ctas, most))),
                                           dim3(Shape::kThreads), Shape::kSharedBytes, where, p,
                                           static_cast<int32_t>(column_tiles));
}

// Choose the rows of a tile by the average size of a group. Groups vary: with an average of 3, nearly all
// have up to 8 rows. A row has the same bits with each of these shapes.
template <typename T>
void mxfp4_gemm(const Mxfp4GemmParams& p, const Launch& where) {
  const int64_t rows = p.m / p.num_groups;
  if (rows <= 3) return launch_mxfp4_gemm<Mxfp4Shape<T, 8>>(p, where);
  if (rows <= 8) return launch_mxfp4_gemm<Mxfp4Shape<T, 16>>(p, where);
  if (rows <= 24) return launch_mxfp4_gemm<Mxfp4Shape<T, 32>>(p, where);
  if (rows <= 64) return launch_mxfp4_gemm<Mxfp4Shape<T, 64>>(p, where);
  launch_mxfp4_gemm<Mxfp4Shape<T, 128>>(p, where);
}

}  // namespace flashinfer::cuda
