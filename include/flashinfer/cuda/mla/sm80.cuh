// Multi-head latent attention by mma.sync: a block has a tile of rows and walks
// through the keys of its item. Rows of the cache lie in shared memory once, as
// keys and as values; those of eight bits are copied as they are, and widened
// there. Logits are computed by warps that share the keys, outputs by warps that
// share the columns.
#pragma once

#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/mla.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/mla/merge.cuh>
#include <flashinfer/cuda/mla/rows.cuh>
#include <flashinfer/cuda/profiler.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/fragment.cuh>
#include <flashinfer/cuda/tile/pipeline.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda::sm80 {

template <int kRows_, int kStages_, typename KV_>
struct MlaShape {
  using KV = KV_;
  static constexpr int kRows = kRows_, kStages = kStages_, kKeys = 32, kThreads = 256;
  static constexpr bool kWidens = sizeof(KV) == 1;
  static constexpr int kBytes = 2 * (kMlaCkv + kMlaKpe),
                       kUnits = kBytes / 16;  // of a row of queries or keys
  static constexpr int kCopiedBytes = sizeof(KV) * (kMlaCkv + kMlaKpe), kCopiedUnits = kCopiedBytes / 16;
  // Logits: groups of 16 rows times halves of the keys. Outputs: groups of 32
  // rows times groups of columns.
  static constexpr int kLogitWarps = kRows / 16 * 2, kColumns = kMlaCkv * (kRows / 32) / 8;
  static constexpr int kQueryBytes = kRows * kBytes, kStageBytes = kKeys * kCopiedBytes, kWeightBytes = 2 * kKeys;
  static constexpr int kWidenedAt = kQueryBytes + kStages * kStageBytes;
  static constexpr int kWeightsAt = kWidenedAt + (kWidens ? kKeys * kBytes : 0);
  static constexpr int kStateAt = kWeightsAt + kRows * kWeightBytes;
  static constexpr int kSharedBytes = kStateAt + 3 * kRows * 4;
  static_assert(kRows == 32 || kRows == 64, "eight warps cover 32 rows or twice as many");
};

// State of rows in shared memory: maxima of the halves of the keys (sums, at
// the end), and the factor of what was summed before.
template <typename S>
struct MlaState {
  float half[2][S::kRows], rescale[S::kRows];
};

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

  __device__ __forceinline__ uint32_t stage(int tile) const {
    return smem + S::kQueryBytes + tile % S::kStages * S::kStageBytes;
  }
  // Where products read the keys of a tile.
  __device__ __forceinline__ uint32_t keys(int tile) const { return S::kWidens ? smem + S::kWidenedAt : stage(tile); }

  __device__ __forceinline__ void load_queries() const {
    for (int i = threadIdx.x; i < S::kRows * S::kUnits; i += S::kThreads) {
      const int row = i / S::kUnits, unit = i % S::kUnits, of_row = row < rows.count ? row : 0;
      const T* from = unit < kMlaCkv / 8 ? rows.nope<T>(of_row) + unit * 8 : rows.pe<T>(of_row) + unit * 8 - kMlaCkv;
      ptx::cp_async_16(Swizzle<S::kBytes>::chunk(Swizzle<S::kBytes>::row(smem, row), unit), from, row < rows.count);
    }
  }

  // Zeros behind the item's end, whatever is there.
  __device__ __forceinline__ void load_keys(int tile) const {
    const int32_t start = item.kv_start + tile * S::kKeys;
    if (start < item.kv_end) {
      using KV = typename S::KV;
      constexpr int kEach = 16 / sizeof(KV), kAll = S::kKeys * S::kCopiedUnits;
      const KV *ckv = static_cast<const KV*>(params.kv.k), *kpe = static_cast<const KV*>(params.kv.v);
#pragma unroll
      for (int i = 0; i < (kAll + S::kThreads - 1) / S::kThreads; ++i) {
        const int at = static_cast<int>(threadIdx.x) + i * S::kThreads;
        if (kAll % S::kThreads != 0 && at >= kAll) break;
        const int row = at / S::kCopiedUnits, unit = at % S::kCopiedUnits;
        const bool wanted = start + row < item.kv_end;
        const MlaPlace place(params.kv, first_page, wanted ? start + row : item.kv_start);
        const KV* from =
            unit < kMlaCkv / kEach ? ckv + place.ckv + unit * kEach : kpe + place.kpe + unit * kEach - kMlaCkv;
        const uint32_t to = S::kWidens ? stage(tile) + at * 16
                                       : Swizzle<S::kBytes>::chunk(Swizzle<S::kBytes>::row(stage(tile), row), unit);
        ptx::cp_async_16(to, from, wanted);
      }
    }
    ptx::cp_async_commit();
  }

  // Sixteen numbers of a row, by a thread, become two units of T.
  __device__ __forceinline__ void widen_keys(int tile) const {
    for (int i = threadIdx.x; i < S::kKeys * S::kCopiedUnits; i += S::kThreads) {
      const uint4 from = ptx::load_shared_16(stage(tile) + i * 16);
      const uint32_t words[4] = {from.x, from.y, from.z, from.w};
      const uint32_t to = Swizzle<S::kBytes>::row(keys(tile), i / S::kCopiedUnits);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t low = words[2 * half], high = words[2 * half + 1];
        ptx::store_shared_16(Swizzle<S::kBytes>::chunk(to, i % S::kCopiedUnits * 2 + half),
                             {widen<T, typename S::KV>(low & 0xffff), widen<T, typename S::KV>(low >> 16),
                              widen<T, typename S::KV>(high & 0xffff), widen<T, typename S::KV>(high >> 16)});
      }
    }
  }

  // Logits of 16 rows and 16 keys become weights in shared memory.
  __device__ __forceinline__ void weigh(int tile, float (&m)[2], float (&l)[2], const int32_t (&end)[2]) const {
    const bool works = warp < S::kLogitWarps;
    const int row0 = warp % (S::kRows / 16) * 16, half = warp / (S::kRows / 16);
    Accumulator<16, 16> s;
    s.clear();
    profiler.turn(Event::kGemmQk);
    if (works) {
      const LeftRows<S::kBytes> q(smem, row0);
      const RightRows<S::kBytes> k(keys(tile), half * 16);
#pragma unroll 4
      for (int step = 0; step < S::kBytes / 32; ++step) {
        uint32_t a[1][4], b[2][2];
        q.load(a[0], 0, step);
        k.load(b, 0, step);
        s.template add<T>(a, b, 0);
      }
      const int32_t key = item.kv_start + tile * S::kKeys + half * 16 + lane % 4 * 2;
      float top[2] = {-math::inf, -math::inf};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& logit = s[0][n][e];
          if (key + 8 * n + e % 2 >= end[e / 2]) logit = -math::inf;
          top[e / 2] = fmaxf(top[e / 2], logit);
        }
      }
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        top[x] = quad_max(top[x]);
        if (lane % 4 == 0) state.half[half][row0 + lane / 4 + 8 * x] = top[x];
      }
    }
    __syncthreads();
    profiler.turn(Event::kSoftmax);
    if (works) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int row = row0 + lane / 4 + 8 * x;
        const float now = fmaxf(m[x], fmaxf(state.half[0][row], state.half[1][row]));
        const float base = now == -math::inf ? 0.0f : now * params.sm_scale_log2;
        const float rescale = math::ptx_exp2(m[x] * params.sm_scale_log2 - base);
        float sum = 0;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float* weight = &s[0][n][2 * x];
          weight[0] = math::ptx_exp2(fmaf(weight[0], params.sm_scale_log2, -base));
          weight[1] = math::ptx_exp2(fmaf(weight[1], params.sm_scale_log2, -base));
          sum += weight[0] + weight[1];
          const uint32_t to =
              Swizzle<S::kWeightBytes>::chunk(Swizzle<S::kWeightBytes>::row(smem + S::kWeightsAt, row), half * 2 + n);
          ptx::store_shared(to + lane % 4 * 4, pack<T>(weight[0], weight[1]));
        }
        l[x] = l[x] * rescale + sum, m[x] = now;
        if (half == 0 && lane % 4 == 0) state.rescale[row] = rescale;
      }
    }
    __syncthreads();
  }

  // Rows 32 (warp's group) + 16 m, columns of the warp: o = o * rescale +
  // weights * values.
  __device__ __forceinline__ void multiply_values(int tile, Accumulator<32, S::kColumns>& o, int row0,
                                                  int column) const {
    bool raised = false;
    float factor[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        factor[m][x] = state.rescale[row0 + 16 * m + lane / 4 + 8 * x];
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
    const LeftRows<S::kWeightBytes> p(smem + S::kWeightsAt, row0);
    const SummedRows<S::kBytes> v(keys(tile), 0);
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

  __device__ __forceinline__ void write(Accumulator<32, S::kColumns>& o, int row0, int column) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int row = row0 + 16 * m + lane / 4 + 8 * x;
        if (row >= rows.count) continue;
        const float l = state.half[0][row] + state.half[1][row];
        const float share = l == 0 ? 0.0f : math::ptx_rcp(l) * (item.slot >= 0 ? 1.0f : params.o_scale);
        const int at = column + lane % 4 * 2;
        if (item.slot >= 0) {
          float* to = rows.partial(row) + at;
#pragma unroll
          for (int n = 0; n < S::kColumns / 8; ++n)
            *reinterpret_cast<float2*>(to + 8 * n) = {o[m][n][2 * x] * share, o[m][n][2 * x + 1] * share};
        } else {
          T* to = rows.out<T>(row) + at;
#pragma unroll
          for (int n = 0; n < S::kColumns / 8; ++n)
            *reinterpret_cast<uint32_t*>(to + 8 * n) = pack<T>(o[m][n][2 * x] * share, o[m][n][2 * x + 1] * share);
        }
      }
    }
  }

  __device__ __forceinline__ void attend() const {
    const int32_t length = item.kv_end - item.kv_start;
    const int tiles = length > 0 ? (length + S::kKeys - 1) / S::kKeys : 0;
    profiler.begin(Event::kLoadQuery);
    load_queries();
#pragma unroll
    for (int i = 0; i < S::kStages; ++i) load_keys(i);
    const int logit_row = warp % (S::kRows / 16) * 16 + lane / 4;
    const int row0 = warp * S::kColumns / kMlaCkv * 32, column = warp * S::kColumns % kMlaCkv;
    const int32_t end[2] = {rows.end(logit_row), rows.end(logit_row + 8)};
    float m[2] = {-math::inf, -math::inf}, l[2] = {0, 0};
    Accumulator<32, S::kColumns> o;
    o.clear();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      profiler.turn(Event::kWaitKeys);
      ptx::cp_async_wait<S::kStages - 1>();
      __syncthreads();
      if constexpr (S::kWidens) {
        profiler.turn(Event::kPackKv);
        widen_keys(tile);
        __syncthreads();
        profiler.turn(Event::kLoadKv);
        load_keys(tile + S::kStages);
      }
      weigh(tile, m, l, end);
      profiler.turn(Event::kGemmPv);
      multiply_values(tile, o, row0, column);
      if constexpr (!S::kWidens) {
        __syncthreads();
        profiler.turn(Event::kLoadKv);
        load_keys(tile + S::kStages);
      }
    }
    if (warp < S::kLogitWarps) {
      const int half = warp / (S::kRows / 16);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        l[x] = quad_sum(l[x]);
        if (lane % 4 == 0) state.half[half][logit_row + 8 * x] = l[x];
      }
    }
    __syncthreads();
    if (warp < S::kRows / 16 && lane % 4 == 0) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int row = logit_row + 8 * x;
        if (row < rows.count) rows.write_lse(row, m[x], state.half[0][row] + state.half[1][row]);
      }
    }
    profiler.turn(Event::kWriteOutput);
    write(o, row0, column);
    profiler.end(Event::kWriteOutput);
    ptx::cp_async_wait<0>();
  }
};

template <typename T, typename S, typename P>
__global__ void __launch_bounds__(S::kThreads, 1) mla_kernel(const __grid_constant__ P params) {
  extern __shared__ __align__(128) uint8_t memory[];
  wait_for_inputs();
  let_next_start();
  Profiler<P::kProfiler> profiler(params);
  if (static_cast<int32_t>(blockIdx.x) >= params.num_items()) return;
  const WorkItem item = params.item(static_cast<int32_t>(blockIdx.x));
  const MlaTile<T, S, P::kProfiler> tile{params,
                                         item,
                                         MlaRows(params, item),
                                         ptx::shared_address(memory),
                                         *reinterpret_cast<MlaState<S>*>(memory + S::kStateAt),
                                         static_cast<int>(threadIdx.x) / 32,
                                         static_cast<int>(threadIdx.x) % 32,
                                         params.kv.indptr[item.batch],
                                         profiler};
  profiler.begin(Event::kItem);
  tile.attend();
  profiler.end(Event::kItem);
  profiler.finish();
}

// Rows of a tile: 64 where a block can have the shared memory for them.
inline int32_t mla_rows(int device) {
  static PerDevice<int32_t> found;
  return found.get(device, [](int which) {
    return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, which) >= MlaShape<64, 2, half_t>::kSharedBytes ? 64 : 32;
  });
}

inline WorkLimits mla_limits(int device) { return {mla_rows(device), device_info(device).num_sms, 256, 32}; }

template <typename T, typename S, typename P>
void launch_mla(const P& params, const Launch& where) {
  static PerDevice<bool> prepared;
  prepared.get(where.device, [](int) {
    check(cudaFuncSetAttribute(mla_kernel<T, S, P>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes),
          "cudaFuncSetAttribute");
    return true;
  });
  launch(mla_kernel<T, S, P>, dim3(static_cast<unsigned>(params.max_items)), dim3(S::kThreads), S::kSharedBytes, where,
         with_tracks(params, params.max_items, S::kThreads));
  launch_mla_merges<T>(params, where);
}

template <typename T, typename KV, typename P>
void mla(const P& params, const Launch& where) {
  if (params.tile_rows == 64) {
    launch_mla<T, MlaShape<64, 2, KV>>(params, where);
  } else {
    launch_mla<T, MlaShape<32, 1, KV>>(params, where);
  }
}

}  // namespace flashinfer::cuda::sm80
