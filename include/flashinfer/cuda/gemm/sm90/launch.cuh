// Launch of grouped GEMM on Hopper: tensor maps of the operands, and the number of CTAs.
#pragma once

#include <algorithm>
#include <cstdint>

#include <flashinfer/common/gemm.h>
#include <flashinfer/cuda/gemm/sm90/serves.h>
#include <flashinfer/cuda/host/tensor_map.h>
#include <flashinfer/cuda/gemm/sm90/kernel.cuh>
#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/host/launch.cuh>

namespace flashinfer::cuda::sm90 {

// Make the map of matrices of rows. The stride of a dimension of size 1 may be arbitrary, but a map needs a
// valid one.
template <typename T>
CUtensorMap rows_map(const void* data, int64_t columns, int64_t rows, int64_t row_stride, int64_t matrices,
                     int64_t matrix_stride, int box_columns, int box_rows) {
  constexpr int64_t kLine = 16 / sizeof(T);
  const int64_t somewhere = (columns + kLine - 1) / kLine * kLine;
  return tensor_map<128, 3>(
      map_type<T>(), sizeof(T),
      {data,
       {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), static_cast<uint64_t>(matrices)},
       {1, rows > 1 ? row_stride : somewhere, matrices > 1 ? matrix_stride : somewhere},
       {static_cast<uint32_t>(box_columns), static_cast<uint32_t>(box_rows), 1}});
}

template <typename S>
GemmMaps tensor_maps(const GemmParams& p, const GemmSettings& settings) {
  using T = typename S::T;
  GemmMaps maps;
  if (p.gate != GemmGate::kNone) {
    const int64_t half = p.n / 2, stride = p.b_stride_n;
    maps.weights = tensor_map<128, 5>(
        map_type<T>(), sizeof(T),
        {p.b,
         {static_cast<uint64_t>(p.k), 8, 2, static_cast<uint64_t>(half / 8), static_cast<uint64_t>(p.num_matrices)},
         {1, stride, half * stride, 8 * stride, p.num_matrices > 1 ? p.b_matrix_stride : stride},
         {S::kDepth, 8, 2, kGemmStrip / 16, 1}});
  } else if (S::kKMajor) {
    maps.weights = rows_map<T>(p.b, p.k, p.n, p.b_stride_n, p.num_matrices, p.b_matrix_stride, S::kDepth, kGemmStrip);
  } else {
    maps.weights = rows_map<T>(p.b, p.n, p.k, p.b_stride_k, p.num_matrices, p.b_matrix_stride, 64, S::kDepth);
  }
  const int64_t stride = stride_of(p.a_layout, p.a_num_rows);
  for (int i = 0; i < 3; ++i)
    maps.tokens[i] = rows_map<T>(p.a, p.k, p.a_num_rows, stride, 1, 0, S::kDepth, kGemmBox >> i);
  maps.out = maps.weights;
  using Out = typename S::Out;
  if (!S::kStores) return maps;
  if (p.gate != GemmGate::kNone) {
    const int64_t half = p.n / 2;
    maps.out = tensor_map<64, 3>(map_type<Out>(), sizeof(Out),
                                 {p.out,
                                  {static_cast<uint64_t>(half), static_cast<uint64_t>(p.m), 1},
                                  {1, p.m > 1 ? settings.out_stride : half, half},
                                  {32, kStoreRows, 1}});
  } else if (settings.lines) {
    maps.out = rows_map<Out>(p.out, p.n, p.m, settings.out_stride, 1, 0, 64, kStoreRows);
  }
  return maps;
}

// Choose the tile for groups of known size: tiles with fewer tokens if they fill the last wave of clusters
// better.
template <typename S>
int32_t tokens_of_tile(const GemmParams& p, int64_t strips, int64_t clusters) {
  if (S::kTokensAreRows) {
    // Halve the tokens of a tile if there are too few tiles for all clusters.
    const int64_t share = p.m_counts.data ? p.m : p.m / p.num_groups * p.num_groups;
    return (share + S::kTokens - 1) / S::kTokens * strips < clusters ? S::kTokens / 2 : S::kTokens;
  }
  if (p.m_indptr.data || p.m_counts.data || p.m < p.num_groups) return S::kTokens;
  const int64_t rows = p.m / p.num_groups;
  int32_t best = S::kTokens;
  double least = 0;
  for (int32_t tokens = S::kTokens; tokens >= 64 && tokens + 96 >= S::kTokens; tokens -= 32) {
    const int64_t down = (rows + tokens - 1) / tokens,
                  rounds = (p.num_groups * down * strips + clusters - 1) / clusters;
    // The overhead of a tile equals about 16 tokens. Large tiles read less, so small ones must gain.
    const double cost =
        static_cast<double>(rounds) * (filled_up_tokens(static_cast<int32_t>((rows + down - 1) / down)) + 16);
    if (least == 0 || cost < 0.97 * least) best = tokens, least = cost;
  }
  return best;
}

// Return false if the module has no 9.0a code for the device.
template <typename S>
bool launch_shape(const GemmParams& p, const Launch& where) {
  if (!serves_sm90a(where.device)) return false;
  const int clusters = device_info(where.device).num_sms / S::kCluster;
  const int64_t strips = (p.n + kGemmStrip * S::kCluster - 1) / (kGemmStrip * S::kCluster);
  const int64_t stride = stride_of(p.out_layout, p.m), bytes = size_of(p.out_dtype);
  const bool same = S::kFp8 ? p.out_dtype == DType::kBFloat16 : p.out_dtype == p.a_dtype;
  const GemmSettings settings{stride_of(p.a_layout, p.a_num_rows),
                              stride,
                              static_cast<int32_t>(strips),
                              tokens_of_tile<S>(p, strips, clusters),
                              same && !p.row_scale && p.n % 8 == 0 && is_aligned(p.out, 16) && stride * bytes % 16 == 0,
                              p.gate};
  // The device knows the sizes of the groups. Each group has at most one tile more than its rows fill.
  const int64_t max_tiles = (p.m / settings.tokens + std::min(p.num_groups, p.m)) * strips;
  Kernel<gemm_kernel<S>>::launch(dim3(static_cast<unsigned>(std::min<int64_t>(clusters, max_tiles) * S::kCluster)),
                                 dim3(kGemmThreads), S::kSharedBytes, S::kCluster, where, p,
                                 tensor_maps<S>(p, settings), settings);
  return true;
}

// Return true if the weights of a strip share one factor.
inline bool strips_share_factors(const GemmParams& p) {
  return !p.b_scale.data || p.b_scale.layout.inner_stride == 0 || p.b_scale.rows % kGemmStrip == 0;
}

// Choose the tile for a group of average size. Gathered rows are loaded by each CTA of a cluster separately,
// so tiles with many tokens gain nothing.
template <typename T, bool kKMajor>
bool launch_gemm(const GemmParams& p, const Launch& where) {
  const int64_t share = p.m / p.num_groups;
  if (share <= 32) return launch_shape<GemmShape<T, kKMajor, GemmSize::kFew>>(p, where);
  if (share <= 160 || p.a_rows || (sizeof(T) == 1 && !strips_share_factors(p)))
    return launch_shape<GemmShape<T, kKMajor, GemmSize::kSome>>(p, where);
  return launch_shape<GemmShape<T, kKMajor, GemmSize::kMany>>(p, where);
}

}  // namespace flashinfer::cuda::sm90
