// The last kernel of the delta rule's gradients over chunks where each channel of k has a gate. What it computes is in
// delta_chunk_gradients.cuh, with the decays of each channel, Gam_ij, inside of the sums over tokens.
//
// A block has a chunk and a head of q and k. Behind products, a thread has a channel of 16 rows: it multiplies by their
// decays one by one, and adds what the rows give each other.
#pragma once

#include <flashinfer/cuda/delta_chunk_channel_products.cuh>

namespace flashinfer::cuda {

template <typename Shape>
struct DeltaChannelGradients : DeltaChannelProducts<Shape> {
  using Base = DeltaChannelProducts<Shape>;
  using T = typename Shape::T;
  using typename Base::Place, typename Base::Rows, typename Base::Shared;
  using KeyRows = Swizzle<2 * Shape::kKeys, kDeltaChunk>;
  static constexpr int kKeys = Shape::kKeys, kThreads = Shape::kThreads, kBlocks = Shared::kBlocks;
  static constexpr int kOwn = kBlocks * kKeys / kThreads;  // channels of a thread, in 16 rows
  using Own = float[kOwn];
  using Base::Base;
  using Base::in, Base::p, Base::shared, Base::space, Base::thread, Base::way;

  // Rows times the decays of their blocks, and the decays of whole blocks.
  __device__ __forceinline__ void scale_rows(const Place& at) const {
    Own a[16], product;
    load_decays(a, at);
#pragma unroll
    for (int e = 0; e < kOwn; ++e) product[e] = 1;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      Own k, q;
      load_own(k, shared.k, i), load_own(q, shared.q, i);
#pragma unroll
      for (int e = 0; e < kOwn; ++e) product[e] *= a[i][e], k[e] *= product[e], q[e] *= product[e];
      store_own(shared.read_k, i, k), store_own(shared.read_q, i, q);
    }
#pragma unroll
    for (int e = 0; e < kOwn; ++e) shared.blocks[block()][channel() + e] = product[e], product[e] = 1;
#pragma unroll
    for (int i = 15; i >= 0; --i) {
      Own k;
      load_own(k, shared.k, i);
#pragma unroll
      for (int e = 0; e < kOwn; ++e) k[e] *= product[e], product[e] *= a[i][e];
      store_own(shared.written_k, i, k);
    }
  }
  // This thread's channels: sums become gradients.
  __device__ __forceinline__ void finish_channels(const Place& at) const {
    const int number = DeltaMatrices::block(block(), block());
    const uint32_t of_ps = ptx::shared_address(shared.p[number]), of_xs = ptx::shared_address(shared.x[number]);
    Own a[16], w[16], decay, along;
    load_decays(a, at);
#pragma unroll
    for (int e = 0; e < kOwn; ++e) decay[e] = 1, along[e] = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = 16 * block() + i;
      float of_p[16], of_x[16];
      Own dq, read;
      load_local(of_p, of_ps, i), load_local(of_x, of_xs, i), load_own(w[i], shared.k, i);
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        decay[e] *= a[i][e];
        dq[e] = decay[e] * shared.queries[row][channel() + e] + of_p[i] * w[i][e];
        read[e] = decay[e] * shared.read[row][channel() + e];
      }
#pragma unroll
      for (int j = 0; j < i; ++j) {
#pragma unroll
        for (int e = 0; e < kOwn; ++e) w[j][e] *= a[i][e], dq[e] += of_p[j] * w[j][e], read[e] += of_x[j] * w[j][e];
      }
#pragma unroll
      for (int e = 0; e < kOwn; ++e)
        shared.queries[row][channel() + e] = dq[e], shared.read[row][channel() + e] = read[e];
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
      for (int e = 0; e < kOwn; ++e) w[i][e] = 0, decay[e] = 1;  // w: what later rows give row i
    }
#pragma unroll
    for (int i = 15; i >= 0; --i) {
      const int row = 16 * block() + i;
      float of_p[16], of_x[16];
      Own k, q;
      load_local(of_p, of_ps, i), load_local(of_x, of_xs, i), load_own(k, shared.k, i), load_own(q, shared.q, i);
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        float &dq = shared.queries[row][channel() + e], &dk = shared.read[row][channel() + e];
        float& sum = shared.col[row][channel() + e];
        const float col = decay[e] * sum + w[i][e] + of_p[i] * q[e];
        along[e] += q[e] * dq + k[e] * (dk - col);
        sum = along[e], dk += col, decay[e] *= a[i][e];
      }
#pragma unroll
      for (int j = 0; j < i; ++j) {
#pragma unroll
        for (int e = 0; e < kOwn; ++e) w[j][e] = a[i][e] * (w[j][e] + of_p[j] * q[e] + of_x[j] * k[e]);
      }
    }
#pragma unroll
    for (int e = 0; e < kOwn; ++e) shared.behind[block()][channel() + e] = along[e];
  }
  // Those of several value heads meet in memory, each number by the same thread.
  __device__ __forceinline__ void add_members(const Place& at) const {
    float* sums = space.sums + static_cast<int64_t>(at.item) * kDeltaChunk * (2 * kKeys) + thread % kKeys;
#pragma unroll 4
    for (int row = thread / kKeys; row < kDeltaChunk; row += kThreads / kKeys) {
      float &dq = shared.queries[row][thread % kKeys], &dk = shared.read[row][thread % kKeys];
      float* to = sums + row * (2 * kKeys);
      if (at.member > 0) dq += to[0], dk += to[kKeys];
      if (!at.last_member(way)) to[0] = dq, to[kKeys] = dk;
    }
  }
  __device__ __forceinline__ void give_gates(const Place& at) const {
    if (channel() >= in.key_dim) return;
    Own sums;  // of <D, S behind the chunk>, and of blocks behind this one
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      const int c = channel() + e;
      float state = 0, decay = 1, product = 0, behind = 0;
#pragma unroll
      for (int i = kBlocks - 1; i >= 0; --i) {
        state += decay * shared.written[i][c], decay *= shared.blocks[i][c];
        if (i > block()) behind += shared.behind[i][c];
      }
#pragma unroll
      for (int part = 0; part < Shared::kParts; ++part) product += shared.product[part][c];
      sums[e] = state + decay * product + behind;
    }
    float* to = static_cast<float*>(p.grad_gk) + channel();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = 16 * block() + i;
      if (row >= at.chunk.count) break;
#pragma unroll
      for (int e = 0; e < kOwn; ++e) to[token(row, at) * in.key_dim + e] = sums[e] + shared.col[row][channel() + e];
    }
  }
  __device__ __forceinline__ void store(const Place& at) const {
    store(p.grad_q, at, shared.queries, shared.q, shared.factors.q_factor);
    store(p.grad_k, at, shared.read, shared.k, shared.factors.k_factor);
  }

 private:
  __device__ __forceinline__ int channel() const { return thread % (kKeys / kOwn) * kOwn; }
  __device__ __forceinline__ int block() const { return thread / (kKeys / kOwn); }
  __device__ __forceinline__ int64_t token(int i, const Place& at) const {
    return (at.chunk.batch * in.num_tokens + at.chunk.first + i) * in.num_value_heads + at.value_head(way);
  }
  // This thread's channels of row i of its block.
  __device__ __forceinline__ uint32_t own(Rows& tile, int i) const {
    const uint32_t row = KeyRows::row(ptx::shared_address(tile), 16 * block() + i);
    return KeyRows::chunk(row, channel() / 8) + channel() % 8 * 2;
  }
  __device__ __forceinline__ void load_own(Own& to, Rows& tile, int i) const {
    if constexpr (kOwn == 2) {
      unpack<T>(ptx::load_shared(own(tile, i)), to[0], to[1]);
    } else {
      to[0] = to_float(*at_of(tile, i));
    }
  }
  __device__ __forceinline__ void store_own(Rows& tile, int i, const Own& from) const {
    if constexpr (kOwn == 2) {
      ptx::store_shared(own(tile, i), pack<T>(from[0], from[1]));
    } else {
      *at_of(tile, i) = from_float<T>(from[0]);
    }
  }
  __device__ __forceinline__ T* at_of(Rows& tile, int i) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(&tile) + (own(tile, i) - ptx::shared_address(tile)));
  }
  // Decays of this thread's channels in its block's rows.
  __device__ __forceinline__ void load_decays(Own (&a)[16], const Place& at) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = 16 * block() + i;
      const bool inside = row < at.chunk.count && channel() < in.key_dim;
      const float* from = static_cast<const float*>(in.gk) + token(row, at) * in.key_dim + channel();
      if constexpr (kOwn == 2) {
        const float2 two = inside ? *reinterpret_cast<const float2*>(from) : make_float2(0.f, 0.f);
        a[i][0] = two.x, a[i][1] = two.y;
      } else {
        a[i][0] = inside ? *from : 0.f;
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
      for (int e = 0; e < kOwn; ++e) a[i][e] = ptx::ex2_approx(a[i][e] * 1.4426950408889634f);
    }
  }

  // Row i of a block on the diagonal, up to the diagonal.
  __device__ __forceinline__ static void load_local(float (&to)[16], uint32_t start, int i) {
#pragma unroll
    for (int part = 0; part <= i / 8; ++part) {
      const uint4 eight = ptx::load_shared_16(start + (8 * (i / 8 * 2 + part) + i % 8) * 16);
      const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) unpack<T>(pairs[e], to[8 * part + 2 * e], to[8 * part + 2 * e + 1]);
    }
  }
  // dq or dk, rows of four threads each, through what normalises.
  __device__ __forceinline__ void store(void* to, const Place& at, const typename Shared::Sums& sums, const Rows& tile,
                                        const float (&factors)[kDeltaChunk]) const {
    const int row = thread / 4;
    const uint32_t start = KeyRows::row(ptx::shared_address(tile), row);
    const int64_t token = (at.chunk.batch * in.num_tokens + at.chunk.first + row) * in.num_heads + at.head;
    float along = 0;
    if (in.l2norm) {
#pragma unroll
      for (int i = 0; i < kKeys / 32; ++i) {
        const int unit = thread % 4 + 4 * i;
        float x[8];
        load_eight(x, start, unit);
#pragma unroll
        for (int e = 0; e < 8; ++e) along += x[e] * sums[row][8 * unit + e];
      }
      along = quad_sum(along) * factors[row] * factors[row];
    }
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      const int unit = thread % 4 + 4 * i;
      float x[8];
      load_eight(x, start, unit);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = sums[row][8 * unit + e] - along * x[e];
      if (row < at.chunk.count && 8 * unit < in.key_dim)
        *reinterpret_cast<uint4*>(static_cast<T*>(to) + token * in.key_dim + 8 * unit) =
            make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
    }
  }
  __device__ __forceinline__ static void load_eight(float (&x)[8], uint32_t row, int unit) {
    const uint4 eight = ptx::load_shared_16(KeyRows::chunk(row, unit));
    unpack<T>(eight.x, x[0], x[1]), unpack<T>(eight.y, x[2], x[3]);
    unpack<T>(eight.z, x[4], x[5]), unpack<T>(eight.w, x[6], x[7]);
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    delta_channel_gradients_kernel(const DeltaRuleBackwardParams p, int64_t chunks) {
  if constexpr (is_gradient_compiled<Shape>()) {
    extern __shared__ __align__(1024) unsigned char memory[];
    using Gradients = DeltaChannelGradients<Shape>;
    auto& shared = *reinterpret_cast<typename Gradients::Shared*>(memory);
    static_assert(sizeof(shared) <= (Shape::kHopper ? 227 : 163) * 1024, "a block of 9.0 or of 8.0 has it");
    wait_for_inputs();
    if (threadIdx.x == 0) {  // what threads would know alike
      shared.space = DeltaChunkSpace(p.in, Shape::kKeys, chunks, p.workspace);
      shared.way = DeltaGradientWay(p.in, chunks, shared.space.strips / Gradients::Stage::kStrips);
    }
    __syncthreads();
    const DeltaGradientWay& way = shared.way;
    DeltaGradientPlace at(p.in, way);
    if (at.done(way)) return;
    constexpr int kAhead = Shape::kStages - 1;
    Gradients(p, shared).load_keys(at);
    for (; at.member < way.group; ++at.member) {
      __syncthreads();  // the value head before has been read
      Gradients(p, shared).load_factors(at);
      ptx::cp_async_commit();
      Gradients(p, shared).load(at, 0);
      ptx::cp_async_wait<1>();
      __syncthreads();
      Gradients(p, shared).scale_rows(at);
      typename Gradients::GradientSums sums;
      float product[8] = {};
      for (at.slice = 0; at.slice < way.slices; ++at.slice) {
        if (kAhead > 0) Gradients(p, shared).load(at, at.slice + kAhead);
        ptx::cp_async_wait<kAhead>();
        __syncthreads();
        Gradients(p, shared).add_slice(at, sums, product);
        __syncthreads();
        if (kAhead == 0) Gradients(p, shared).load(at, at.slice + 1);
      }
      Gradients(p, shared).finish_products(at, static_cast<float>(p.in.scale.get()), sums, product);
      Gradients(p, shared).finish_channels(at);
      __syncthreads();
      if (way.group > 1) Gradients(p, shared).add_members(at);
      if (p.grad_gk) Gradients(p, shared).give_gates(at);
    }
    __syncthreads();
    Gradients(p, shared).store(at);
  }
}

}  // namespace flashinfer::cuda
