// First kernel of the chunk form with a decay per channel (Kimi Delta Attention, arXiv 2510.26692): P and Z
// of every chunk and value head, and the rows of k and q times e^G. chunk.cuh has the equations.
//
// A warp has a block of 16 rows. Within a block, the decays between two rows are multiplied one by one.
// Between blocks, tensor cores compute the products. The newer row is multiplied by the decays from the start
// of its block, the older row by the decays to the end of its block. Decays are multiplied as they are,
// without logarithms: none exceeds 1, and a decay of 0 stays exact.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/solve.cuh>
#include <flashinfer/cuda/delta_rule/columns.cuh>
#include <flashinfer/cuda/ptx/approx.cuh>

namespace flashinfer::cuda {

template <int kKeys>
struct DeltaChannelShared {
  static constexpr int kBlocks = kDeltaChunk / 16;
  using Tile = uint4[kDeltaChunk][kKeys / 8];

  union {
    struct {
      Tile k, q;
      float decay[kDeltaChunk][kKeys];
    };
    struct {
      DeltaSolveMatrix left, right;
    };
  };
  float in_block[kBlocks][16][32];    // L and P within a block, by row and lane
  float block_decay[kBlocks][kKeys];  // decay over all rows of a block
  float beta[kDeltaChunk], k_factor[kDeltaChunk], q_factor[kDeltaChunk];
};

template <typename T, int kKeys>
struct DeltaPrepareChannels : DeltaSolve<T, DeltaChannelShared<kKeys>> {
  using Shared = DeltaChannelShared<kKeys>;
  using Base = DeltaSolve<T, Shared>;
  using Terms = DeltaChannelTerms<kKeys>;
  using Rows = Swizzle<2 * kKeys>;
  using Base::store_operand, Base::kThreads, Base::lane, Base::shared, Base::sync, Base::thread, Base::as_float2,
      Base::warp;
  static constexpr int kBytes = 2 * kKeys, kBlocks = Shared::kBlocks;
  static constexpr int kLaneChannels = kKeys / 32;  // per lane
  static constexpr int kPairChannels = kKeys / 16;  // per lane, if each half of a warp covers all channels
  using LaneChannels = uint32_t[kLaneChannels / 2];

  const DeltaRuleInputs& in;

  __device__ __forceinline__ DeltaPrepareChannels(const DeltaRuleInputs& inputs, Shared& memory)
      : Base(memory, threadIdx.x, 0), in(inputs) {}

  // Compute the terms of a chunk and value head.
  __device__ __forceinline__ void run(const DeltaChunk& chunk, int64_t value_head, float scale, Terms& to) const {
    load(chunk, value_head);
    correlate_block();
    __syncwarp();
    store_rows(to);
    sync();
    Accumulator<16, kDeltaChunk> l, p;
    correlate_blocks(l, p);
    sync();
    store_l_and_p(l, p, scale, to);
    this->solve(to);
    store(scale, to);
  }

 private:
  __device__ __forceinline__ void load(const DeltaChunk& chunk, int64_t value_head) const {
    this->copy_rows(in, chunk, value_head);
    const int64_t number = (chunk.batch * in.num_tokens + chunk.first) * in.num_value_heads + value_head;
    float gates[16][kLaneChannels], product[kLaneChannels];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = 16 * warp + i;
      const bool inside = row < chunk.count && kLaneChannels * lane < in.key_dim;
      const int64_t token = number + row * in.num_value_heads;
      const float common_gate = row < chunk.count && in.g ? load_float<float>(in.g, token) : 0.f;
#pragma unroll
      for (int e = 0; e < kLaneChannels; ++e) gates[i][e] = 0;
      if (inside) load_floats(gates[i], static_cast<const float*>(in.gk) + token * in.key_dim + kLaneChannels * lane);
#pragma unroll
      for (int e = 0; e < kLaneChannels; ++e) gates[i][e] += common_gate;
    }
#pragma unroll
    for (int e = 0; e < kLaneChannels; ++e) product[e] = 1;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
      for (int e = 0; e < kLaneChannels; ++e)
        gates[i][e] = ptx::ex2_approx(gates[i][e] * 1.4426950408889634f), product[e] *= gates[i][e];
      store_floats(&shared.decay[16 * warp + i][kLaneChannels * lane], gates[i]);
    }
    store_floats(&shared.block_decay[warp][kLaneChannels * lane], product);
    if (thread < kDeltaChunk)
      shared.beta[thread] = thread >= chunk.count ? 0.f
                            : in.beta             ? load_float<float>(in.beta, number + thread * in.num_value_heads)
                                                  : 1.f;
    ptx::cp_async_wait<0>();
    sync();
    this->find_factors(in.l2norm);
    sync();  // warps then scale their rows in place, which others may still be reading
  }

  // Compute L and P within a block, without the rows' factors. In each half of the warp, lanes 0 to 7 have
  // columns of L and lanes 8 to 15 columns of P. Lane l has column 2 (l % 8) + half.
  __device__ __forceinline__ void correlate_block() const {
    const int half = lane / 16, channel = lane % 16 * kPairChannels;
    const uint32_t keys = ptx::shared_address(shared.k), queries = ptx::shared_address(shared.q);
    float w[8][kPairChannels];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < kPairChannels; ++e) w[j][e] = 0;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float a[kPairChannels], k[kPairChannels], q[kPairChannels], values[16];
      load_floats(a, &shared.decay[16 * warp + i][channel]);
      load_row(k, keys, 16 * warp + i, channel), load_row(q, queries, 16 * warp + i, channel);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float of_k = 0, of_q = 0;
        if (2 * j <= i) {
          const bool first = 2 * j + half == i;
#pragma unroll
          for (int e = 0; e < kPairChannels; ++e) {
            w[j][e] *= a[e];
            if (2 * j >= i - 1 && first) w[j][e] = k[e];
            of_k += k[e] * w[j][e], of_q += q[e] * w[j][e];
          }
        }
        values[j] = of_k, values[8 + j] = of_q;
      }
      shared.in_block[warp][i][lane] = lanes_sums(values);
    }
  }

  // Multiply rows by decays. Rows for products with the state go to gmem, rows for products between blocks to
  // smem. The decays of all blocks must be visible.
  __device__ __forceinline__ void store_rows(Terms& to) const {
    const uint32_t keys = ptx::shared_address(shared.k), queries = ptx::shared_address(shared.q);
    const int channel = kLaneChannels * lane;
    // Decays over the blocks before this warp's, over those after it, and over the chunk.
    float before[kLaneChannels], after[kLaneChannels], all[kLaneChannels];
#pragma unroll
    for (int e = 0; e < kLaneChannels; ++e) before[e] = after[e] = 1;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float of[kLaneChannels];
      load_floats(of, &shared.block_decay[block][channel]);
#pragma unroll
      for (int e = 0; e < kLaneChannels; ++e) {
        if (block < warp) before[e] *= of[e];
        if (block > warp) after[e] *= of[e];
        all[e] = block == 0 ? of[e] : all[e] * of[e];
      }
    }
    if (warp == 0) store_floats(&to.decay[channel], all);
    LaneChannels written[16];
    float product[kLaneChannels];
#pragma unroll
    for (int e = 0; e < kLaneChannels; ++e) product[e] = 1;
#pragma unroll
    for (int i = 15; i >= 0; --i) {
      float a[kLaneChannels], k[kLaneChannels];
      load_floats(a, &shared.decay[16 * warp + i][channel]);
      load_row(k, keys, 16 * warp + i, channel);
      LaneChannels row;
#pragma unroll
      for (int e = 0; e < kLaneChannels; e += 2) {
        const float low = k[e] * product[e], high = k[e + 1] * product[e + 1];
        written[i][e / 2] = pack<T>(low, high), row[e / 2] = pack<T>(low * after[e], high * after[e + 1]);
      }
      store_row(to.update, 16 * warp + i, row);
#pragma unroll
      for (int e = 0; e < kLaneChannels; ++e) product[e] *= a[e];
    }
#pragma unroll
    for (int e = 0; e < kLaneChannels; ++e) product[e] = 1;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float a[kLaneChannels], k[kLaneChannels], q[kLaneChannels];
      load_floats(a, &shared.decay[16 * warp + i][channel]);
      __syncwarp();  // rows overwrite the decays read so far
      load_row(k, keys, 16 * warp + i, channel), load_row(q, queries, 16 * warp + i, channel);
      LaneChannels read, out, row;
#pragma unroll
      for (int e = 0; e < kLaneChannels; ++e) product[e] *= a[e], k[e] *= product[e], q[e] *= product[e];
#pragma unroll
      for (int e = 0; e < kLaneChannels; e += 2)
        read[e / 2] = pack<T>(k[e], k[e + 1]), out[e / 2] = pack<T>(q[e], q[e + 1]);
      store_shared_row(read_rows(), i, channel, read), store_shared_row(queries, 16 * warp + i, channel, out);
      store_shared_row(keys, 16 * warp + i, channel, written[i]);
#pragma unroll
      for (int e = 0; e < kLaneChannels; e += 2)
        row[e / 2] = pack<T>(k[e] * before[e], k[e + 1] * before[e + 1]),
                out[e / 2] = pack<T>(q[e] * before[e], q[e + 1] * before[e + 1]);
      store_row(to.k, 16 * warp + i, row), store_row(to.q, 16 * warp + i, out);
    }
  }

  // Compute L and P between this block and earlier ones, without the rows' factors.
  __device__ __forceinline__ void correlate_blocks(Accumulator<16, kDeltaChunk>& l,
                                                   Accumulator<16, kDeltaChunk>& p) const {
    const SmemOperandA<kBytes> keys(read_rows(), 0), queries(ptx::shared_address(shared.q), 16 * warp);
    const SmemOperandB<kBytes> others(ptx::shared_address(shared.k), 0);
    l.clear(), p.clear();
#pragma unroll 2
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t k[1][4], q[1][4];
      keys.load(k[0], 0, step), queries.load(q[0], 0, step);
      float between[4] = {1.f, 1.f, 1.f, 1.f};  // decays of the blocks in between, in a lane's four channels
#pragma unroll
      for (int block = kBlocks - 2; block >= 0; --block) {
        if (block >= warp) continue;
        uint32_t left[1][4], right[1][4], b[2][2];
        if (block + 1 < warp) {
          float* of = &shared.block_decay[block + 1][16 * step + 2 * (lane % 4)];
          const float2 first = *as_float2(of), second = *as_float2(of + 8);
          between[0] *= first.x, between[1] *= first.y, between[2] *= second.x, between[3] *= second.y;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          left[0][i] = decayed(k[0][i], between[i / 2 * 2], between[i / 2 * 2 + 1]);
          right[0][i] = decayed(q[0][i], between[i / 2 * 2], between[i / 2 * 2 + 1]);
        }
        others.load(b, block, step);
        l.template add<T>(left, b, block), p.template add<T>(right, b, block);
      }
    }
  }

  // Store L in smem, where it overwrites the rows, and P in gmem.
  __device__ __forceinline__ void store_l_and_p(Accumulator<16, kDeltaChunk>& l, Accumulator<16, kDeltaChunk>& p,
                                                float scale, Terms& to) const {
    const int start = 16 * warp, upper = start + lane / 4;
#pragma unroll
    for (int n = 0; n < kDeltaChunk / 8 - 2; ++n) {
      if (n / 2 >= warp) continue;
      const int column = 8 * n + 2 * (lane % 4);
      const float2 k = *as_float2(&shared.k_factor[column]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = upper + 8 * half;
        const float of_k = shared.k_factor[row], of_q = scale * shared.q_factor[row];
        p[0][n][2 * half] *= k.x * of_q, p[0][n][2 * half + 1] *= k.y * of_q;
        *as_float2(&shared.left[row][column]) =
            make_float2(l[0][n][2 * half] * (k.x * of_k), l[0][n][2 * half + 1] * (k.y * of_k));
      }
    }
#pragma unroll
    for (int column = 0; column < kBlocks - 1; ++column) {
      if (column >= warp) continue;
      store_operand(to.p[DeltaTerms::block(warp, column)], p[0][2 * column], p[0][2 * column + 1], 1.f);
    }
    const bool is_query = lane % 16 >= 8;
    const int j = 2 * (lane % 8) + lane / 16;
    const float factor = shared.k_factor[start + j];
    auto& matrix = is_query ? shared.right : shared.left;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float of = is_query ? scale * shared.q_factor[start + i] : shared.k_factor[start + i];
      matrix[start + i][start + j] =
          j < i || (is_query && j == i) ? shared.in_block[warp][i][lane] * (factor * of) : 0.f;
    }
    __syncwarp();
    float x[2][4];
    this->load_accumulator(shared.right, start, start, x);
    store_operand(to.p[DeltaTerms::block(warp, warp)], x[0], x[1], 1.f);
    __syncwarp();
  }

  __device__ __forceinline__ void store(float scale, Terms& to) const {
    DeltaGradientFactors& factors = to;
    const int i = thread % kDeltaChunk;
    if (thread < kDeltaChunk) {
      factors.k_decay[i] = factors.update_decay[i] = factors.k_factor[i] = shared.k_factor[i],
      factors.log2_decay[i] = 0;
    } else {
      factors.beta[i] = shared.beta[i], factors.q_decay[i] = scale * shared.q_factor[i];
      factors.q_factor[i] = shared.q_factor[i];
    }
  }

  // Return the rows of k that read a state. In this block's smem, they overwrite the decays.
  __device__ __forceinline__ uint32_t read_rows() const { return ptx::shared_address(&shared.decay[16 * warp]); }

  template <int kCount>
  __device__ __forceinline__ static void load_row(float (&to)[kCount], uint32_t tile, int row, int channel) {
    const uint32_t at = Rows::chunk(Rows::row(tile, row), channel / 8) + channel % 8 * 2;
    uint32_t words[kCount / 2];
    if constexpr (kCount == 8) {
      const uint4 four = ptx::load_shared_16(at);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else if constexpr (kCount == 4) {
      const uint2 pair = ptx::load_shared_8(at);
      words[0] = pair.x, words[1] = pair.y;
    } else {
      words[0] = ptx::load_shared(at);
    }
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) unpack<T>(words[i], to[2 * i], to[2 * i + 1]);
  }
  __device__ __forceinline__ static void store_shared_row(uint32_t tile, int row, int channel,
                                                          const LaneChannels& words) {
    const uint32_t at = Rows::chunk(Rows::row(tile, row), channel / 8) + channel % 8 * 2;
#pragma unroll
    for (int i = 0; i < kLaneChannels / 2; ++i) ptx::store_shared(at + 4 * i, words[i]);
  }
  __device__ __forceinline__ void store_row(typename Terms::Rows& to, int row, const LaneChannels& words) const {
    uint32_t* at = reinterpret_cast<uint32_t*>(&to[row]) + kLaneChannels / 2 * lane;
    if constexpr (kLaneChannels == 4) {
      *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
    } else {
      *at = words[0];
    }
  }
  __device__ __forceinline__ static uint32_t decayed(uint32_t pair, float first, float second) {
    float low, high;
    unpack<T>(pair, low, high);
    return pack<T>(low * first, high * second);
  }

  // Sum 16 values over 16 lanes. Each lane returns the total of its own value.
  __device__ __forceinline__ float lanes_sums(const float (&values)[16]) const {
    float eight[8], four[4], pair[2];
    halve_lanes(eight, values, 8), halve_lanes(four, eight, 4), halve_lanes(pair, four, 2);
    float one[1];
    halve_lanes(one, pair, 1);
    return one[0];
  }
  template <int kCount>
  __device__ __forceinline__ void halve_lanes(float (&to)[kCount], const float (&from)[2 * kCount], int by) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float own = lane & by ? from[kCount + i] : from[i], sent = lane & by ? from[i] : from[kCount + i];
      to[i] = own + __shfl_xor_sync(kAllLanes, sent, by);
    }
  }
};

template <typename T, int kKeys>
__global__ void __launch_bounds__(DeltaPrepareChannels<T, kKeys>::kThreads)
    delta_prepare_channels_kernel(const DeltaRuleInputs in, DeltaChannelTerms<kKeys>* all) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<DeltaChannelShared<kKeys>*>(memory);
  wait_for_inputs();
  const auto heads = static_cast<uint32_t>(in.num_value_heads);
  const int64_t value_head = blockIdx.x % heads, number = blockIdx.x / heads;
  const DeltaChunk chunk = find_chunk(in, number);
  if (chunk.count <= 0) return;
  DeltaPrepareChannels<T, kKeys>(in, shared)
      .run(chunk, value_head, static_cast<float>(in.scale.get()), all[blockIdx.x]);
}

}  // namespace flashinfer::cuda
