// A warp's part of attention's gradients: recompute P, compute dS, and multiply with both.
#pragma once

#include <cstdint>
#include <type_traits>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cuda/attention/backward/shape.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/fragment.cuh>
#include <flashinfer/cuda/tile/swizzle.cuh>

namespace flashinfer::cuda {

// c = products of 32 left rows with kColumns right rows. kLeft and kRight are added to the addresses: tiles
// with equal row lengths share a lane's address pattern.
template <typename T, int kLeft, int kRight, int kBytes, int kColumns>
__device__ __forceinline__ void multiply(Accumulator<32, kColumns>& c, const SmemOperandA<kBytes>& left,
                                         const SmemOperandB<kBytes>& right) {
  c.clear();
#pragma unroll
  for (int step = 0; step < kBytes / 32; ++step) {
    uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) left.load(a[m], m, step, kLeft);
#pragma unroll
    for (int pair = 0; pair < kColumns / 16; ++pair) {
      uint32_t b[2][2];
      right.load(b, pair, step, kRight);
      c.template add<T>(a, b, pair);
    }
  }
}

// sums += weights times kN rows. The warp's columns start at chunk first_chunk of a row.
template <typename T, int kOffset, int kBytes, int kN, int kColumns>
__device__ __forceinline__ void add(Accumulator<32, kColumns>& sums, const RegisterOperandA<32, kN>& weights,
                                    const SmemOperandBTransposed<kBytes>& rows, int first_chunk) {
#pragma unroll
  for (int step = 0; step < kN / 16; ++step) {
#pragma unroll
    for (int pair = 0; pair < kColumns / 16; ++pair) {
      uint32_t b[2][2];
      rows.load(b, step, first_chunk + 2 * pair, kOffset);
      sums.template add<T>(weights[step], b, pair);
    }
  }
}

// Logits of one query head: the scaled product, then the bias of ALiBi, then the soft cap.
struct BackwardLogits {
  float scale, slope, cap, rcp_cap;

  __device__ __forceinline__ BackwardLogits(const PrefillBackwardParams& p, float slope_)
      : scale(p.sm_scale), slope(slope_), cap(p.logits_soft_cap), rcp_cap(math::ptx_rcp(cap)) {}

  // Return the logit in base 2. `d_cap` becomes the derivative of the soft cap.
  __device__ __forceinline__ float operator()(float product, int32_t ahead, float& d_cap) const {
    float x = product * scale + slope * static_cast<float>(ahead);
    d_cap = 1;
    if (cap > 0) {
      const float e = math::ptx_exp2(x * rcp_cap * (2 * math::log2e)), capped = 1 - 2 * math::ptx_rcp(1 + e);
      d_cap = 1 - capped * capped;
      x = capped * cap;
    }
    return x * math::log2e;
  }
};

template <typename S>
class BackwardWarp {
 public:
  using T = typename S::T;
  Accumulator<32, 8 * S::kTilesQK> grad_qk;                    // dK or dQ
  Accumulator<32, S::kOfKeys ? 8 * S::kTilesVO : 16> grad_vo;  // dV
  BackwardRow rows[S::kOfKeys ? 1 : 4];                        // of a lane, if rows are queries
  const int group, split;
  float slope = 0;  // ALiBi's slope of the query head

  __device__ __forceinline__ BackwardWarp(const PrefillBackwardParams& p, const BackwardMask& mask, uint32_t shared,
                                          int stages, int32_t row_start)
      : group(static_cast<int>(threadIdx.x) / 32 / S::kSplit),
        split(static_cast<int>(threadIdx.x) / 32 % S::kSplit),
        p_(p),
        mask_(mask),
        qk_(shared, 32 * group),
        vo_(shared + S::kRows * S::kQKRow, 32 * group),
        exchange_(shared + S::kRowsBytes + stages * S::kStageBytes + group * 32 * S::kExchangeRow),
        row_(row_start + 32 * group) {
    grad_qk.clear();
    grad_vo.clear();
  }

  // Compute a stage of columns. Its first column is number `column` of the request.
  __device__ __forceinline__ void columns(uint32_t stage, const BackwardRow* rows_of_stage, int32_t column,
                                          bool bias_or_cap) {
#pragma unroll 1
    for (int step = 0; step < S::kColumns; step += S::kStep) {
      if (!sees_any(column + step)) continue;
      const int own = step + split * S::kN;  // first column of this warp's logits
      Products s, dp;
      const SmemOperandB<S::kQKRow> right(stage, own);
      multiply<T, 0, 0>(s, qk_, right);
      if constexpr (kSameRows) {
        multiply<T, S::kRows * S::kQKRow, S::kColumns * S::kQKRow>(dp, qk_, right);
      } else {
        multiply<T, 0, 0>(dp, vo_, SmemOperandB<S::kVORow>(stage + S::kColumns * S::kQKRow, own));
      }
      Weights weights, ds;
      const BackwardRow* at = rows_of_stage + own + 2 * lane() % 8;
      if (bias_or_cap) {
        recompute_p<true, true>(s, dp, weights, ds, at, column + own);
      } else if (sees_all(column + own)) {
        recompute_p<false, false>(s, dp, weights, ds, at, column + own);
      } else {
        recompute_p<false, true>(s, dp, weights, ds, at, column + own);
      }
      if constexpr (S::kSplit > 1) {
        if constexpr (S::kOfKeys) store_exchange(weights, 0);
        store_exchange(ds, 1);
      }

      const SmemOperandBTransposed<S::kQKRow> qk(stage, step);
      const SmemOperandBTransposed<S::kVORow> vo(kSameRows ? stage : stage + S::kColumns * S::kQKRow, step);
      add_all(weights, ds, qk, vo, split);
      if constexpr (S::kSplit > 1) {
        ptx::named_barrier<32 * S::kSplit>(1 + group);
#pragma unroll
        for (int other = 1; other < S::kSplit; ++other) {
          const int part = (split + other) % S::kSplit;
          if constexpr (S::kOfKeys) load_exchange(weights, 0, part);
          load_exchange(ds, 1, part);
          add_all(weights, ds, qk, vo, part);
        }
      }
    }
  }

 private:
  static constexpr bool kSameRows = S::kQKRow == S::kVORow;  // one pattern of addresses serves both
  using Products = Accumulator<32, S::kN>;
  using Weights = RegisterOperandA<32, S::kN>;

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // Return how far the key is ahead of the query's position. The key is `row` if S::kOfKeys, otherwise
  // `column`.
  __device__ __forceinline__ int32_t ahead(int32_t row, int32_t column) const {
    return S::kOfKeys ? mask_.ahead(column, row) : mask_.ahead(row, column);
  }

  // Return true if the group's rows see any of a step's columns under the window and the causal mask.
  __device__ __forceinline__ bool sees_any(int32_t column) const {
    const int32_t one = ahead(row_, column + S::kStep - 1), other = ahead(row_ + 31, column);
    return min(one, other) <= mask_.right && max(one, other) >= -mask_.left;
  }

  // Return true if no logit of the warp is masked. Queries and rows after the last need no mask: such a query
  // has zero Q and dO, and such a row is not written.
  __device__ __forceinline__ bool sees_all(int32_t column) const {
    const int32_t one = ahead(row_, column + S::kN - 1), other = ahead(row_ + 31, column);
    return max(one, other) <= mask_.right && min(one, other) >= -mask_.left && mask_.bits == nullptr &&
           (S::kOfKeys || column + S::kN <= mask_.kv_len);
  }

  // Compute P and dS from Q K^T and dO V^T, as operands of the next products.
  template <bool kBiasOrCap, bool kMasked>
  __device__ __forceinline__ void recompute_p(const Products& s, const Products& dp, Weights& weights, Weights& ds,
                                              const BackwardRow* rows_of_columns, int32_t column) const {
    const int32_t row0 = row_ + lane() / 4, column0 = column + 2 * (lane() % 4);
    const int32_t ahead0 = ahead(row0, column0), most = mask_.right - ahead0, least = -mask_.left - ahead0;
    const float scale = p_.sm_scale * math::log2e;
    const BackwardLogits logits(p_, slope);
    Bits bits = ~Bits{0};
    if (kMasked && mask_.bits) bits = custom_bits(column);
#pragma unroll
    for (int n = 0; n < S::kN / 8; ++n) {
      float4 two_rows{0, 0, 0, 0};  // two BackwardRows
      if constexpr (S::kOfKeys) two_rows = *reinterpret_cast<const float4*>(rows_of_columns + 8 * n);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float weight[4], ds_values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float lse = S::kOfKeys ? (i % 2 ? two_rows.z : two_rows.x) : rows[2 * m + i / 2].lse;
          const float delta = S::kOfKeys ? (i % 2 ? two_rows.w : two_rows.y) : rows[2 * m + i / 2].delta;
          const int row = 16 * m + i / 2 * 8, col = 8 * n + i % 2, distance = S::kOfKeys ? row - col : col - row;
          float d_cap = 1;
          const float x = kBiasOrCap ? logits(s[m][n][i], ahead0 + distance, d_cap) - lse : s[m][n][i] * scale - lse;
          weight[i] = math::ptx_exp2(x);
          if constexpr (kMasked) {
            const bool exists = column0 + col < (S::kOfKeys ? mask_.qo_len : mask_.kv_len);
            const bool visible =
                distance <= most && distance >= least && exists && (bits >> ((m * (S::kN / 8) + n) * 4 + i) & 1);
            weight[i] = visible ? weight[i] : 0.0f;
          }
          ds_values[i] = (kBiasOrCap ? weight[i] * d_cap : weight[i]) * (dp[m][n][i] - delta);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = n % 2 * 2 + half;
          if constexpr (S::kOfKeys) weights[n / 2][m][at] = pack<T>(weight[2 * half], weight[2 * half + 1]);
          ds[n / 2][m][at] = pack<T>(ds_values[2 * half], ds_values[2 * half + 1]);
        }
      }
    }
  }

  using Bits = std::conditional_t<(S::kN > 32), uint64_t, uint32_t>;

  // Return the bits of a custom mask for a query and 32 keys from `key` on. Read no byte after the mask's
  // last bit.
  __device__ __forceinline__ uint32_t seen_keys(int32_t query, int32_t key) const {
    if (query >= mask_.qo_len || key >= mask_.kv_len) return 0;
    const int64_t row = static_cast<int64_t>(query) * mask_.kv_len, first = row + key;
    const int64_t byte = first >> 3, last = (row + min(key + 32, mask_.kv_len) - 1) >> 3;
    uint64_t bits = 0;
#pragma unroll
    for (int i = 0; i < 5; ++i)
      if (byte + i <= last) bits |= static_cast<uint64_t>(mask_.bits[byte + i]) << 8 * i;
    return static_cast<uint32_t>(bits >> (first & 7));
  }

  // Return the mask bits of a lane's elements, in the order of recompute_p. Each lane reads the bits of one
  // query.
  __device__ __forceinline__ Bits custom_bits(int32_t column) const {
    Bits bits = 0;
    if constexpr (S::kOfKeys) {
      const uint32_t seen = lane() < S::kN ? seen_keys(column + lane(), row_) : 0;
#pragma unroll
      for (int n = 0; n < S::kN / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t query_bits = __shfl_sync(~0u, seen, 8 * n + 2 * (lane() % 4) + j) >> lane() / 4;
#pragma unroll
          for (int i = 0; i < 4; ++i)  // keys eight apart
            bits |= static_cast<Bits>(query_bits >> 8 * i & 1) << ((i / 2 * (S::kN / 8) + n) * 4 + i % 2 * 2 + j);
        }
      }
    } else {
#pragma unroll
      for (int start = 0; start < S::kN; start += 32) {
        const uint32_t seen = seen_keys(row_ + lane(), column + start);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // queries eight apart
          const uint32_t query_bits = __shfl_sync(~0u, seen, 8 * i + lane() / 4) >> 2 * (lane() % 4);
#pragma unroll
          for (int n = 0; n < 4 && start + 8 * n < S::kN; ++n)
            bits |= static_cast<Bits>(query_bits >> 8 * n & 3)
                    << ((i / 2 * (S::kN / 8) + start / 8 + n) * 4 + i % 2 * 2);
        }
      }
    }
    return bits;
  }

  __device__ __forceinline__ void add_all(const Weights& weights, const Weights& ds,
                                          const SmemOperandBTransposed<S::kQKRow>& qk,
                                          const SmemOperandBTransposed<S::kVORow>& vo, int part) {
    if constexpr (S::kOfKeys)
      add<T, kSameRows ? S::kColumns * S::kQKRow : 0>(grad_vo, weights, vo.below(part * S::kN), split * S::kTilesVO);
    add<T, 0>(grad_qk, ds, qk.below(part * S::kN), split * S::kTilesQK);
  }

  // Address of the buffer in which warps of the same rows exchange operands. `which`: 0 for P (only if rows
  // are keys), 1 for dS.
  __device__ __forceinline__ uint32_t exchange(int which) const {
    return exchange_ + (S::kOfKeys ? which * S::kExchangeBytes : 0);
  }
  __device__ __forceinline__ void store_exchange(const Weights& weights, int which) const {
    using Rows = Swizzle<S::kExchangeRow>;
    const uint32_t rows = Rows::row(exchange(which), lane() / 4) + lane() % 4 * 4;
#pragma unroll
    for (int n = 0; n < S::kN / 8; ++n) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          ptx::store_shared(Rows::chunk(rows, split * (S::kN / 8) + n) + (16 * m + 8 * half) * S::kExchangeRow,
                            weights[n / 2][m][n % 2 * 2 + half]);
      }
    }
  }
  __device__ __forceinline__ void load_exchange(Weights& weights, int which, int part) const {
    const SmemOperandA<S::kExchangeRow> rows(exchange(which), 0);
#pragma unroll
    for (int step = 0; step < S::kN / 16; ++step) {
#pragma unroll
      for (int m = 0; m < 2; ++m) rows.load(weights[step][m], m, part * (S::kN / 16) + step);
    }
  }

  const PrefillBackwardParams& p_;
  const BackwardMask& mask_;
  const SmemOperandA<S::kQKRow> qk_;
  const SmemOperandA<S::kVORow> vo_;
  const uint32_t exchange_;  // in shared memory
  const int32_t row_;        // first row of the group
};

}  // namespace flashinfer::cuda
