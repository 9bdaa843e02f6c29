// The mainloop of the portable kernel of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). For
// each tile of keys:
//   S = Q K^T;  m' = max(m, rowmax S);  P = 2^(S - m');  l = l 2^(m - m') + rowsum P;  O = O 2^(m - m') + P V
// A row of the cache is in smem once, as key and as value. 8-bit rows are copied unchanged, then widened to
// 16 bits and multiplied by their scales in float. For S, warps divide rows and keys. For O, they divide rows
// and columns.
#pragma once

#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/mla.h>
#include <flashinfer/cuda/mla/rows.cuh>
#include <flashinfer/cuda/mla/sm80_shape.cuh>
#include <flashinfer/cuda/profiler.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/fragment.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda::sm80 {

template <typename T, typename S, bool kProfiler>
struct MlaTile {
  const MlaParams& params;
  const WorkItem& item;
  const MlaRows rows;
  const uint32_t smem;
  MlaState<S>& state;
  const int warp, lane;
  const int32_t first_page;
  Profiler<kProfiler>& profiler;
  const RowLane<S::kKeys, S::kThreads> key_lane{!S::kWidens};

  __device__ __forceinline__ uint32_t stage(int tile) const {
    return smem + S::kQueryBytes + tile % S::kStages * S::kStageBytes;
  }
  // Return the address of a tile's 16-bit keys.
  __device__ __forceinline__ uint32_t keys(int tile) const { return S::kWidens ? smem + S::kWidenedAt : stage(tile); }

  // Return the address of the scales of a row of a tile.
  __device__ __forceinline__ uint32_t scales(int tile, int row) const {
    return smem + S::kScalesAt + tile % S::kStages * S::kStageScaleBytes + row * kMlaScales * 4;
  }

  // First row and column of the part of O that a warp accumulates.
  __device__ __forceinline__ static int first_row(int warp) { return warp * S::kColumns / kMlaCkv * 32; }
  __device__ __forceinline__ static int first_column(int warp) { return warp * S::kColumns % kMlaCkv; }

  // A warp converts 16 rows and half of the keys of S to P: the index of its half, and its first row.
  __device__ __forceinline__ int logit_half() const { return warp / (S::kRows / S::kPairRows) % 2; }
  __device__ __forceinline__ int logit_row() const {
    return warp % (S::kRows / S::kPairRows) * S::kPairRows + (S::kSplitsHeadDim ? warp / 4 * 16 : 0);
  }

  __device__ __forceinline__ void load_queries() const {
    const RowLane<S::kRows, S::kThreads> at(true);
    const int row = at.row < rows.count ? at.row : 0;
    at.template copy<S, true>(smem, rows.nope<T>(row), rows.pe<T>(row), at.row < rows.count);
  }

  // Return the page of the row of a tile that this thread copies. The caller looks it up one tile ahead.
  __device__ __forceinline__ int32_t page_of(int tile) const {
    const int32_t key = item.kv_start + tile * S::kKeys + key_lane.row;
    return key < item.kv_end ? params.kv.indices[first_page + static_cast<int32_t>(params.kv.page_size.div(key))] : -1;
  }

  // Return true if this thread's row of the next tile overlaps the exchange buffer. It is copied after the
  // exchange.
  __device__ __forceinline__ bool copies_late() const { return key_lane.row >= S::kKeys - S::kLateRows; }
  __device__ __forceinline__ uint32_t exchange_address(int tile, int to_warp) const {
    return stage(tile + 1) + (S::kKeys - S::kLateRows) * S::kCopiedBytes + to_warp * S::kExchangeBytes + lane * 16;
  }

  // Copy a tile of keys, with zeros after the end of the item.
  __device__ __forceinline__ void load_keys(int tile, int32_t& page) const {
    using KV = typename S::KV;
    const KvCache& kv = params.kv;
    if (item.kv_start + tile * S::kKeys < item.kv_end) {
      const int32_t key = item.kv_start + tile * S::kKeys + key_lane.row;
      const bool valid = page >= 0;
      const int32_t row = valid ? key - static_cast<int32_t>(kv.page_size.div(key) * kv.page_size.divisor) : 0;
      const int64_t from = valid ? page : 0;
      key_lane.template copy<S, !S::kWidens>(stage(tile), static_cast<const KV*>(kv.k) + kv.k_offset(from, row),
                                             static_cast<const KV*>(kv.v) + kv.v_offset(from, row), valid);
      if constexpr (S::kScaled) {
        if (key_lane.unit < kMlaScales)
          ptx::cp_async_4(scales(tile, key_lane.row) + key_lane.unit * 4, params.scales_of(from, row) + key_lane.unit,
                          valid);
      }
      page = page_of(tile + 1);
    }
    ptx::cp_async_commit();
  }

  // Widen 8-bit keys. A thread converts 16 numbers of a row to two 16-byte units of T.
  __device__ __forceinline__ void widen_keys(int tile) const {
    int thread = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(thread));  // the compiler recomputes addresses per tile, because registers are few
    for (int i = thread; i < S::kKeys * S::kCopiedUnits; i += S::kThreads) {
      const uint4 from = ptx::load_shared_16(stage(tile) + i * 16);
      const uint32_t words[4] = {from.x, from.y, from.z, from.w};
      const uint32_t to = Swizzle<S::kBytes>::row(keys(tile), i / S::kCopiedUnits);
      [[maybe_unused]] float scale = 1.0f;
      if constexpr (S::kScaled) {
        const int group = i % S::kCopiedUnits * 16 / kMlaScaleColumns;
        if (group < kMlaScales) scale = ptx::load_shared_float(scales(tile, i / S::kCopiedUnits) + group * 4);
      }
      const auto wide = [&](uint32_t two) {
        if constexpr (S::kScaled) return widen_scaled<T, typename S::KV>(two, scale);
        return widen<T, typename S::KV>(two);
      };
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t low = words[2 * half], high = words[2 * half + 1];
        ptx::store_shared_16(Swizzle<S::kBytes>::chunk(to, i % S::kCopiedUnits * 2 + half),
                             {wide(low & 0xffff), wide(low >> 16), wide(high & 0xffff), wide(high >> 16)});
      }
    }
  }

  // Elements of S that a thread has: 16 rows and half of the keys of a warp.
  using Logits = float[S::kHalf / 8][4];

  __device__ __forceinline__ void multiply_keys(int tile, Logits& s) const {
    const int part = S::kSplitsHeadDim ? warp / 4 : 0;
    Accumulator<S::kPairRows, S::kHalf> sums;
    sums.clear();
    SmemOperandA<S::kBytes> q(smem, warp % (S::kRows / S::kPairRows) * S::kPairRows);
    SmemOperandB<S::kBytes> k(keys(tile), logit_half() * S::kHalf);
    // With kSplitsHeadDim, each of two warps takes 32 elements of every 64.
    q.at = Swizzle<S::kBytes>::chunk(q.at, 4 * part), k.at = Swizzle<S::kBytes>::chunk(k.at, 4 * part);
#pragma unroll
    for (int i = 0; i < S::kBytes / 32; ++i) {
      // 8-bit rotary keys have another scale than latents. They come first, and their sums are then
      // multiplied once by the ratio of both scales.
      const int step = S::kWidens ? (i + kMlaCkv / 16) % (S::kBytes / 32) : i;
      if constexpr (S::kWidens) {
        if (i == kMlaKpe / 16) {
#pragma unroll
          for (int m = 0; m < S::kPairRows / 16; ++m)
#pragma unroll
            for (int n = 0; n < S::kHalf / 8; ++n)
#pragma unroll
              for (int e = 0; e < 4; ++e) sums[m][n][e] *= params.pe_factor;
        }
      }
      if (S::kSplitsHeadDim && step % 4 >= 2) continue;
      uint32_t a[S::kPairRows / 16][4], b[2][2];
#pragma unroll
      for (int m = 0; m < S::kPairRows / 16; ++m) q.load(a[m], m, step);
#pragma unroll
      for (int pair = 0; pair < S::kHalf / 16; ++pair) {
        k.load(b, pair, step);
        sums.template add<T>(a, b, pair);
      }
    }
    if constexpr (S::kSplitsHeadDim) {
#pragma unroll
      for (int n = 0; n < S::kHalf / 8; ++n) {
        uint32_t words[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          words[e] = __float_as_uint(part == 0 ? sums[1][n][e] : sums[0][n][e]);
          s[n][e] = part == 0 ? sums[0][n][e] : sums[1][n][e];
        }
        ptx::store_shared_16(exchange_address(tile, warp ^ 4) + n * 512, {words[0], words[1], words[2], words[3]});
      }
      ptx::named_barrier<64>(1 + warp % 4);
#pragma unroll
      for (int n = 0; n < S::kHalf / 8; ++n) {
        const uint4 other = ptx::load_shared_16(exchange_address(tile, warp) + n * 512);
        const uint32_t words[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] += __uint_as_float(words[e]);
      }
    } else {
#pragma unroll
      for (int n = 0; n < S::kHalf / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = sums[0][n][e];
      }
    }
  }

  // Mask keys that rows do not see.
  __device__ __forceinline__ void mask_keys(int tile, Logits& s) const {
    const int32_t key = item.kv_start + tile * S::kKeys + logit_half() * S::kHalf + lane % 4 * 2;
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int32_t end = rows.end(logit_row() + lane / 4 + 8 * x);
#pragma unroll
      for (int n = 0; n < S::kHalf / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (key + 8 * n + e >= end) s[n][2 * x + e] = -math::inf;
      }
    }
  }

  // Compute P of 16 rows and half of the keys, and store it to smem. m is updated lazily, only if an element
  // of P would exceed 2^8. O and l are then rescaled.
  __device__ __forceinline__ void exponentiate(int tile, float (&m)[2], float (&l)[2], int32_t& page) const {
    const int half = logit_half(), row0 = logit_row();
    // Uniform over two warps that exchange sums: both compute S, or neither.
    const bool computes_s = warp < S::kSWarps && row0 / S::kPairRows * S::kPairRows < rows.count;
    Logits s;
    profiler.switch_to(Event::kGemmQk);
    if (computes_s) {
      multiply_keys(tile, s);
      if (item.kv_start + (tile + 1) * S::kKeys > rows.end(0)) mask_keys(tile, s);
      float tile_max[2] = {-math::inf, -math::inf};
#pragma unroll
      for (int n = 0; n < S::kHalf / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) tile_max[e / 2] = fmaxf(tile_max[e / 2], s[n][e]);
      }
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        tile_max[x] = quad_max(tile_max[x]);
        if (lane % 4 == 0) state.of_half[half][row0 + lane / 4 + 8 * x] = tile_max[x];
      }
    }
    __syncthreads();
    if (S::kSplitsHeadDim && copies_late()) load_keys(tile + 1, page);
    profiler.switch_to(Event::kSoftmax);
    if (computes_s) {
      const float scale = params.sm_scale_log2;
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int row = row0 + lane / 4 + 8 * x;
        const float tile_max = fmaxf(state.of_half[0][row], state.of_half[1][row]);
        float rescale = 1.0f;
        if ((tile_max - m[x]) * scale > 8.0f) rescale = math::ptx_exp2((m[x] - tile_max) * scale), m[x] = tile_max;
        const float base = m[x] == -math::inf ? 0.0f : m[x] * scale;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < S::kHalf / 8; ++n) {
          float* p = &s[n][2 * x];
          p[0] = math::ptx_exp2(fmaf(p[0], scale, -base));
          p[1] = math::ptx_exp2(fmaf(p[1], scale, -base));
          sum += p[0] + p[1];
          const uint32_t to = Swizzle<S::kPRowBytes>::chunk(Swizzle<S::kPRowBytes>::row(smem + S::kPAt, row),
                                                            half * (S::kHalf / 8) + n);
          ptx::store_shared(to + lane % 4 * 4, pack<T>(p[0], p[1]));
        }
        l[x] = l[x] * rescale + sum;
        if (half == 0 && lane % 4 == 0) state.rescale[row] = rescale;
      }
    }
    __syncthreads();
  }

  // O = O * rescale + P V for 32 rows from row0 on, and S::kColumns columns from `column` on.
  __device__ __forceinline__ void multiply_values(int tile, Accumulator<32, S::kColumns>& o, int row0,
                                                  int column) const {
    if (row0 >= rows.count) return;
    bool raised = false;
    float factor[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        factor[m][x] = row0 + 16 * m < rows.count ? state.rescale[row0 + 16 * m + lane / 4 + 8 * x] : 1.0f;
        raised |= factor[m][x] != 1.0f;
      }
    }
    if (__any_sync(kAllLanes, raised)) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < S::kColumns / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[m][n][e] *= factor[m][e / 2];
        }
      }
    }
    const SmemOperandA<S::kPRowBytes> p(smem + S::kPAt, row0);
    const SmemOperandBTransposed<S::kBytes> v(keys(tile), 0);
#pragma unroll
    for (int step = 0; step < S::kKeys / 16; ++step) {
      uint32_t a[2][4];
      p.load(a[0], 0, step);
      p.load(a[1], 1, step);
#pragma unroll
      for (int pair = 0; pair < S::kColumns / 16; ++pair) {
        uint32_t b[2][2];
        v.load(b, step, column / 8 + 2 * pair);
        o.template add<T>(a, b, pair);
      }
    }
  }

  // Return the factor that normalises a row of O: 1 / l, or the value of finish_row() if rows have sinks.
  __device__ __forceinline__ float output_factor(int row) const {
    if (params.maybe_sinks != nullptr) return state.rescale[row];
    const float l = state.of_half[0][row] + state.of_half[1][row];
    return l == 0 ? 0.0f : math::ptx_rcp(l);
  }

  // Write lse, or m and l, of a row. If it has a sink, stores its factor of O to smem.
  __device__ __forceinline__ void finish_row(const MlaRows& out_rows, int row, float m) const {
    float l = state.of_half[0][row] + state.of_half[1][row], base = out_rows.base(m, l);
    if (params.maybe_sinks != nullptr) {
      const float rescale = out_rows.add_sink(row, base, l);
      state.rescale[row] = l == 0 ? 0.0f : rescale * math::ptx_rcp(l);
    }
    out_rows.write_softmax(row, base, l);
  }

  __device__ __forceinline__ void write_output(const MlaRows& out_rows, Accumulator<32, S::kColumns>& o) const {
    int thread = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(thread));  // the compiler recomputes addresses instead of holding them over the mainloop
    const int lane = thread % 32, row0 = first_row(thread / 32), column = first_column(thread / 32);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int row = row0 + 16 * m + lane / 4 + 8 * x;
        if (row >= out_rows.count) continue;
        const float out_factor = out_rows.item.slot >= 0 ? 1.0f : output_factor(row) * params.o_scale;
        const int at = column + lane % 4 * 2;
        if (out_rows.item.slot >= 0) {
          float* to = out_rows.partial(row) + at;
#pragma unroll
          for (int n = 0; n < S::kColumns / 8; ++n)
            *reinterpret_cast<float2*>(to + 8 * n) = {o[m][n][2 * x], o[m][n][2 * x + 1]};
        } else {
          T* to = out_rows.out<T>(row) + at;
#pragma unroll
          for (int n = 0; n < S::kColumns / 8; ++n)
            *reinterpret_cast<uint32_t*>(to + 8 * n) =
                pack<T>(o[m][n][2 * x] * out_factor, o[m][n][2 * x + 1] * out_factor);
        }
      }
    }
  }

  __device__ __forceinline__ void attend() const {
    const int32_t length = item.kv_end - item.kv_start;
    const int tiles = length > 0 ? (length + S::kKeys - 1) / S::kKeys : 0;
    profiler.begin(Event::kLoadQuery);
    int32_t page = page_of(0);
    load_queries();
    load_keys(0, page);
    const int first = logit_row() + lane / 4;
    const int row0 = first_row(warp), column = first_column(warp);
    float m[2] = {-math::inf, -math::inf}, l[2] = {0, 0};
    Accumulator<32, S::kColumns> o;
    o.clear();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      profiler.switch_to(Event::kWaitKeys);
      ptx::cp_async_wait<0>();
      __syncthreads();
      if constexpr (S::kStages == 2) {
        profiler.switch_to(Event::kLoadKv);
        if (!copies_late()) load_keys(tile + 1, page);
      }
      if constexpr (S::kWidens) {
        profiler.switch_to(Event::kPackKv);
        widen_keys(tile);
        __syncthreads();
      }
      if constexpr (S::kWidens && S::kStages == 1) {
        profiler.switch_to(Event::kLoadKv);
        load_keys(tile + 1, page);
      }
      exponentiate(tile, m, l, page);
      profiler.switch_to(Event::kGemmPv);
      multiply_values(tile, o, row0, column);
      if constexpr (!S::kWidens && S::kStages == 1) {
        __syncthreads();
        profiler.switch_to(Event::kLoadKv);
        load_keys(tile + 1, page);
      }
    }
    if (warp < S::kSWarps) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        l[x] = quad_sum(l[x]);
        if (lane % 4 == 0) state.of_half[logit_half()][first + 8 * x] = l[x];
      }
    }
    __syncthreads();
    // Reloads the item instead of holding it in registers over the mainloop.
    const WorkItem reloaded = params.item(static_cast<int32_t>(blockIdx.x));
    const MlaRows out_rows(params, reloaded);
    if (warp < S::kSWarps && logit_half() == 0 && lane % 4 == 0) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int row = first + 8 * x;
        if (row < out_rows.count) finish_row(out_rows, row, m[x]);
      }
    }
    if (params.maybe_sinks != nullptr) __syncthreads();
    profiler.switch_to(Event::kWriteOutput);
    write_output(out_rows, o);
    profiler.end(Event::kWriteOutput);
    ptx::cp_async_wait<0>();
  }
};

}  // namespace flashinfer::cuda::sm80
