// Gradients of attention on CUDA, without atomics: the same bits in every run.
//
// One kernel has a block for each tile of keys, which sees the queries of all the heads that use them go by; another
// one for each tile of queries. Both compute the logits, so that there are seven products instead of five, and nobody
// waits for anybody to add. Where tiles of keys are too few for the GPU, several blocks share one's queries, and a
// third kernel adds what they have found.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <vector>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cuda/attention/backward/shape.cuh>
#include <flashinfer/cuda/attention/backward/tile.cuh>
#include <flashinfer/cuda/attention/shape.cuh>
#include <flashinfer/cuda/attention/sm80/load.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

// In p.memory is a BackwardRow for each row, and then the parts of the sums of keys' gradients.
FLASHINFER_HD BackwardRow* rows_in_memory(const PrefillBackwardParams& p) {
  return reinterpret_cast<BackwardRow*>(p.memory);
}
FLASHINFER_HD int64_t floats_of_rows(const PrefillBackwardParams& p) {
  return (p.tokens * p.num_qo_heads + 31) / 32 * 64;
}

// Starts the copy of kCount rows of a head from token `first` on; zeros behind the last of `count` and behind `dim`.
// Eight threads have a row, 128 bytes of it at a time.
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

// The columns of a block, stage by stage.
template <typename S>
struct BackwardColumns {
  using T = typename S::T;
  const PrefillBackwardParams& p;
  const BackwardEntry& one;
  int32_t head, begin, end;  // of the columns; the head advances where they are queries
  int32_t next;              // first column of the next stage

  __device__ __forceinline__ const HeadRows& qk() const { return S::kOfKeys ? p.q : p.k; }
  __device__ __forceinline__ const HeadRows& vo() const { return S::kOfKeys ? p.grad : p.v; }

  // Starts the copies of the next stage.
  __device__ __forceinline__ void load(uint32_t stage) {
    const int32_t count = (S::kOfKeys ? one.qo_len : one.kv_len) - next;
    const int64_t first = int64_t{S::kOfKeys ? one.qo_start : one.kv_start} + next;
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

// A warp's sums as rows of a gradient, or of float where several blocks share a tile.
template <typename T, int kTiles>
__device__ __forceinline__ void write_rows(const HeadRows& to, int64_t token, int32_t head, int32_t rows, int32_t dim,
                                           int first_column, const Sums<kTiles>& sums, float scale) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * m + 8 * half + lane / 4;
      if (row >= rows) continue;
      T* at = to.at<T>(token + row, head) + first_column + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (first_column + 8 * n >= dim) continue;
        const float a = sums[m][n][2 * half] * scale, b = sums[m][n][2 * half + 1] * scale;
        if constexpr (sizeof(T) == 4) {
          *reinterpret_cast<float2*>(at + 8 * n) = float2{a, b};
        } else {
          *reinterpret_cast<uint32_t*>(at + 8 * n) = pack<T>(a, b);
        }
      }
    }
  }
}

// A part of the sums of keys' gradients: rows of both, one behind the other.
__device__ __forceinline__ HeadRows sums_of(const PrefillBackwardParams& p, int32_t part) {
  const int64_t dim = p.head_dim_qk + p.head_dim_vo;
  return {p.memory + floats_of_rows(p) + part * p.kv_tokens * p.num_kv_heads * dim, p.num_kv_heads * dim, dim};
}

template <typename S>
__device__ __forceinline__ void write_gradients(const PrefillBackwardParams& p, const BackwardEntry& one,
                                                const BackwardWarp<S>& warp, int32_t row, int32_t head, int32_t part) {
  using T = typename S::T;
  const int64_t token = int64_t{S::kOfKeys ? one.kv_start : one.qo_start} + row;
  const int32_t rows = (S::kOfKeys ? one.kv_len : one.qo_len) - row;
  const int qk = warp.split * S::kTilesQK * 8, vo = warp.split * S::kTilesVO * 8;
  if constexpr (!S::kOfKeys) {
    write_rows<T>(p.dq, token, head, rows, p.head_dim_qk, qk, warp.of_qk, p.sm_scale);
  } else if (p.splits == 1) {
    write_rows<T>(p.dk, token, head, rows, p.head_dim_qk, qk, warp.of_qk, p.sm_scale);
    write_rows<T>(p.dv, token, head, rows, p.head_dim_vo, vo, warp.of_vo, 1.0f);
  } else {
    HeadRows to = sums_of(p, part);
    write_rows<float>(to, token, head, rows, p.head_dim_qk, qk, warp.of_qk, p.sm_scale);
    to.data = static_cast<float*>(to.data) + p.head_dim_qk;
    write_rows<float>(to, token, head, rows, p.head_dim_vo, vo, warp.of_vo, 1.0f);
  }
}

// Whether every GPU that these kernels are for has room for two stages: there is no code for one then.
template <typename S>
constexpr bool kTwoStages = S::shared_bytes(2) <= (163 << 10);

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    prefill_backward_kernel(const __grid_constant__ PrefillBackwardParams p,
                            const __grid_constant__ BackwardTable table, const int most_stages) {
  const int stages = kTwoStages<S> ? 2 : most_stages;
  extern __shared__ __align__(128) uint8_t memory[];
  using T = typename S::T;
  let_next_start();
  const int32_t heads = S::kOfKeys ? p.num_kv_heads : p.num_qo_heads, group = p.num_qo_heads / p.num_kv_heads;
  const int32_t head = static_cast<int32_t>(blockIdx.x) % heads, rest = static_cast<int32_t>(blockIdx.x) / heads;
  const int32_t parts = S::kOfKeys ? p.splits : 1, part = rest % parts;
  int32_t tile = rest / parts;
  const BackwardEntry& one = table.find(tile);
  const BackwardMask mask(p, one);
  // With a causal mask the first keys and the last queries have the most to do: they come first.
  const int32_t count = S::kOfKeys ? one.kv_len : one.qo_len;
  const int32_t row_start = (S::kOfKeys ? tile : (count + S::kRows - 1) / S::kRows - 1 - tile) * S::kRows;

  BackwardColumns<S> columns{p, one, S::kOfKeys ? head * group : head / group, 0, 0, 0};
  mask.template columns<S::kOfKeys>(row_start, min(row_start + S::kRows, count) - 1, columns.begin, columns.end);
  columns.begin = columns.begin / S::kColumns * S::kColumns;
  const int32_t of_head = (columns.end - columns.begin + S::kColumns - 1) / S::kColumns;  // stages
  const int64_t all = int64_t{of_head} * (S::kOfKeys ? group : 1);
  int32_t left = static_cast<int32_t>(all * (part + 1) / parts - all * part / parts);
  columns.next = columns.begin;
  if (S::kOfKeys && left > 0) {
    const int32_t skipped = static_cast<int32_t>(all * part / parts);
    columns.head += skipped / of_head, columns.next += skipped % of_head * S::kColumns;
  }

  const uint32_t shared = shared_address(memory), ring = shared + S::kRowsBytes;
  BackwardWarp<S> warp(p, mask, shared, stages, row_start);
  if (left > 0) {
    const int64_t first = int64_t{S::kOfKeys ? one.kv_start : one.qo_start} + row_start;
    load_rows<T, S::kQKRow, S::kRows, S::kThreads>(shared, S::kOfKeys ? p.k : p.q, first, head, count - row_start,
                                                   p.head_dim_qk);
    load_rows<T, S::kVORow, S::kRows, S::kThreads>(shared + S::kRows * S::kQKRow, S::kOfKeys ? p.v : p.grad, first,
                                                   head, count - row_start, p.head_dim_vo);
    if constexpr (!S::kOfKeys) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t row = row_start + 32 * warp.group + static_cast<int32_t>(threadIdx.x) % 32 / 4 + 8 * i;
        const int64_t at = (int64_t{one.qo_start} + row) * p.num_qo_heads + head;
        warp.rows[i] = row < count ? rows_in_memory(p)[at] : BackwardRow{math::inf, 0};
      }
      if (p.alibi_slopes) warp.slope = p.alibi_slopes[head];
    }
    columns.load(ring);
    ptx::cp_async_commit();
  }
  const auto rows_of = [&](int stage) {
    return reinterpret_cast<const BackwardRow*>(memory + S::kRowsBytes + stage * S::kStageBytes + S::kTilesBytes);
  };
  const bool bends = p.alibi_slopes != nullptr || p.logits_soft_cap > 0;
  for (int stage = 0; left > 0; --left) {
    const int32_t column = columns.next;
    if (S::kOfKeys && p.alibi_slopes) warp.slope = p.alibi_slopes[columns.head];
    ptx::cp_async_wait<0>();
    __syncthreads();
    const int next = stages == 2 ? 1 - stage : 0;
    columns.advance();
    if (stages == 2 && left > 1) columns.load(ring + next * S::kStageBytes), ptx::cp_async_commit();
    warp.columns(ring + stage * S::kStageBytes, rows_of(stage), column, bends);
    if (stages == 1 && left > 1) {
      __syncthreads();
      columns.load(ring), ptx::cp_async_commit();
    }
    stage = next;
  }
  wait_for_inputs();  // of the kernel before, so that this one does not end before it: nothing else of it is needed
  write_gradients<S>(p, one, warp, row_start + 32 * warp.group, head, part);
}

constexpr int kRowLanes = 16, kRowThreads = 256;

// Writes a BackwardRow for each row.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    prefill_backward_rows_kernel(const __grid_constant__ PrefillBackwardParams p) {
  const int64_t at = int64_t{blockIdx.x} * (kRowThreads / kRowLanes) + threadIdx.x / kRowLanes;
  const int64_t row = min(at, p.tokens * p.num_qo_heads - 1);
  const T* out = p.out.at<const T>(row / p.num_qo_heads, row % p.num_qo_heads);
  const T* grad = p.grad.at<const T>(row / p.num_qo_heads, row % p.num_qo_heads);
  float sum = 0;
  for (int d = threadIdx.x % kRowLanes * 8; d < p.head_dim_vo; d += kRowLanes * 8) {
    float a[8], b[8];
    load_vec<T, 8>(out + d).to_floats(a), load_vec<T, 8>(grad + d).to_floats(b);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += a[i] * b[i];
  }
#pragma unroll
  for (int lanes = kRowLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (threadIdx.x % kRowLanes != 0 || row != at) return;
  const float lse = p.lse[row];
  rows_in_memory(p)[row] = {lse == -math::inf ? math::inf : lse, sum - p.grad_lse[row] * math::log2e};
}

// Adds the parts of keys' gradients in their order, eight numbers of a row at a time.
template <typename T>
__global__ void prefill_backward_sum_kernel(const __grid_constant__ PrefillBackwardParams p, const int64_t tokens) {
  const int64_t dim = p.head_dim_qk + p.head_dim_vo, chunks = dim / 8;
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= tokens * p.num_kv_heads * chunks) return;
  const int64_t row = i / chunks;
  const int32_t chunk = static_cast<int32_t>(i % chunks) * 8, head = static_cast<int32_t>(row % p.num_kv_heads);
  float sums[8] = {};
  for (int part = 0; part < p.splits; ++part) {
    float more[8];
    load_vec<float, 8>(sums_of(p, part).template at<const float>(row / p.num_kv_heads, head) + chunk).to_floats(more);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] += more[j];
  }
  const bool of_k = chunk < p.head_dim_qk;
  T* to = (of_k ? p.dk : p.dv).template at<T>(row / p.num_kv_heads, head) + chunk - (of_k ? 0 : p.head_dim_qk);
  *reinterpret_cast<Vec<T, 8>*>(to) = Vec<T, 8>::from_floats(sums);
}

// ---- from the host ------------------------------------------------------------------------------------------------

// All requests, those with the most logits first.
inline std::vector<BackwardEntry> backward_entries(const PrefillBackwardParams& p) {
  std::vector<BackwardEntry> entries(p.batch_size);
  int64_t kv_start = 0, mask_start = 0;
  for (int64_t b = 0; b < p.batch_size; ++b) {
    BackwardEntry& one = entries[b];
    one.qo_start = p.qo_indptr ? p.qo_indptr[b] : 0;
    one.qo_len = static_cast<int32_t>(p.qo_indptr ? p.qo_indptr[b + 1] - one.qo_start : p.tokens);
    one.kv_start = static_cast<int32_t>(kv_start);
    one.kv_len = static_cast<int32_t>(p.kv_lens ? p.kv_lens[b] : p.kv_tokens);
    one.mask_start = mask_start;
    if (int64_t{one.qo_len} + one.kv_len >= int64_t{1} << 30)
      throw std::runtime_error("prefill_backward: a request has 2^30 queries and keys or more");
    kv_start += one.kv_len;
    mask_start += (int64_t{one.qo_len} * one.kv_len + 7) / 8;
  }
  std::stable_sort(entries.begin(), entries.end(), [](const BackwardEntry& a, const BackwardEntry& b) {
    return int64_t{a.qo_len} * a.kv_len > int64_t{b.qo_len} * b.kv_len;
  });
  return entries;
}

// Into how many parts the queries of a tile of keys are split, so that the longest is not what all others wait for; the
// blocks of the queries' kernel follow while these end.
template <typename S>
int32_t backward_splits(const PrefillBackwardParams& p, const Launch& where) {
  constexpr int64_t kMostBytes = int64_t{1} << 28;
  const int64_t heads = p.num_kv_heads, group = p.num_qo_heads / heads;
  const int64_t places = int64_t{device_info(where.device).num_sms} * S::kBlocks;
  int64_t tiles = 0, longest = 0, all = 0;
  for (const BackwardEntry& one : backward_entries(p)) {
    const BackwardMask mask(p, one);
    for (int32_t row = 0; row < one.kv_len; row += S::kRows, ++tiles) {
      if (tiles * heads >= 4 * places) return 1;
      int32_t begin, end;
      mask.columns<true>(row, std::min(row + S::kRows, one.kv_len) - 1, begin, end);
      const int64_t steps = (end - begin + S::kColumns - 1) / S::kColumns * group;
      longest = std::max(longest, steps), all += steps * heads;
    }
  }
  const int64_t bytes = std::max<int64_t>(1, p.kv_tokens * heads * (p.head_dim_qk + p.head_dim_vo) * 4);
  int32_t splits = 1;  // the queries' kernel has three products to the four of this one
  while (splits < 16 && 2 * splits * bytes <= kMostBytes && 4 * splits <= longest &&
         longest * places * 3 > all * splits * 5)
    splits *= 2;
  return splits;
}

// Sets p.splits and returns the bytes of p.memory.
inline int64_t prefill_backward_plan(PrefillBackwardParams& p, const Launch& where) {
  const int32_t qk = p.head_dim_qk, vo = p.head_dim_vo;
  if (qk <= 64 && vo <= 64) {
    p.splits = backward_splits<BackwardShapes<half_t, 64, 64>::Keys>(p, where);
  } else if (qk <= 128 && vo <= 128) {
    p.splits = backward_splits<BackwardShapes<half_t, 128, 128>::Keys>(p, where);
  } else if (qk <= 192 && vo <= 128) {
    p.splits = backward_splits<BackwardShapes<half_t, 192, 128>::Keys>(p, where);
  } else {
    p.splits = backward_splits<BackwardShapes<half_t, 256, 256>::Keys>(p, where);
  }
  const int64_t sums = p.splits == 1 ? 0 : p.splits * p.kv_tokens * p.num_kv_heads * (qk + vo);
  return (floats_of_rows(p) + sums) * static_cast<int64_t>(sizeof(float));
}

// How many stages fit, one or two; the kernel's attributes are set once for each device.
template <typename S>
int backward_stages(int device) {
  constexpr int kMaxDevices = 64;
  static int found[kMaxDevices];
  static std::once_flag once[kMaxDevices];
  device_info(device);  // which it checks
  std::call_once(once[device], [&] {
    const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    const int stages = kTwoStages<S> || S::shared_bytes(2) <= most ? 2 : 1;
    if (S::shared_bytes(stages) > most) return;
    const auto kernel = prefill_backward_kernel<S>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::shared_bytes(stages)),
          "cudaFuncSetAttribute");
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
          "cudaFuncSetAttribute");
    found[device] = stages;
  });
  if (found[device] == 0)
    throw std::runtime_error("prefill_backward: a tile does not fit into this GPU's shared memory");
  return found[device];
}

// Launches of one of the two kernels for as many requests as a table holds each. They may start when the launch before
// them has no blocks left to start, where that is one of these, too.
template <typename S>
void launch_backward(const PrefillBackwardParams& p, const std::vector<BackwardEntry>& entries, const Launch& where,
                     bool& first) {
  const int stages = backward_stages<S>(where.device);
  const int64_t each = S::kOfKeys ? int64_t{p.num_kv_heads} * p.splits : p.num_qo_heads;
  for (size_t next = 0; next < entries.size();) {
    BackwardTable table{};
    int64_t tiles = 0;
    for (; next < entries.size() && table.count < kBackwardEntries; ++next) {
      const int32_t rows = S::kOfKeys ? entries[next].kv_len : entries[next].qo_len;
      if (rows == 0) continue;
      table.at[table.count] = entries[next];
      table.at[table.count++].first_tile = static_cast<int32_t>(tiles);
      tiles += (rows + S::kRows - 1) / S::kRows;
    }
    if (tiles == 0) continue;
    if (tiles * each > INT32_MAX) throw std::runtime_error("prefill_backward: more than 2147483647 blocks");
    const Launch how{where.stream, where.device, first ? 0 : where.pdl};
    launch(prefill_backward_kernel<S>, dim3(static_cast<unsigned>(tiles * each)), dim3(S::kThreads),
           S::shared_bytes(stages), how, p, table, stages);
    first = false;
  }
}

template <typename T, int kQK, int kVO>
void prefill_backward(const PrefillBackwardParams& p, const Launch& where) {
  using Shapes = BackwardShapes<T, kQK, kVO>;
  const std::vector<BackwardEntry> entries = backward_entries(p);
  constexpr int kEach = kRowThreads / kRowLanes;
  const int64_t blocks = (p.tokens * p.num_qo_heads + kEach - 1) / kEach;
  launch(prefill_backward_rows_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kRowThreads), 0,
         Launch{where.stream, where.device, 0}, p);
  bool first = true;
  launch_backward<typename Shapes::Keys>(p, entries, where, first);
  using Few = typename Shapes::FewQueries;
  int64_t rows = 0;
  for (const BackwardEntry& one : entries) rows += (one.qo_len + Few::kRows - 1) / Few::kRows * Few::kRows;
  if (rows / Few::kRows * p.num_qo_heads <= int64_t{device_info(where.device).num_sms} * Few::kBlocks) {
    launch_backward<Few>(p, entries, where, first);
  } else {
    launch_backward<typename Shapes::Queries>(p, entries, where, first);
  }
  if (p.splits == 1) return;
  int64_t tokens = 0;
  for (const BackwardEntry& one : entries) tokens += one.kv_len;
  const int64_t threads = tokens * p.num_kv_heads * ((p.head_dim_qk + p.head_dim_vo) / 8);
  launch(prefill_backward_sum_kernel<T>, dim3(static_cast<unsigned>((threads + 255) / 256)), dim3(256), 0,
         Launch{where.stream, where.device, 0}, p, tokens);
}

}  // namespace flashinfer::cuda
