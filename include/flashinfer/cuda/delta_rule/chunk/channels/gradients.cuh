// Third kernel of the chunk gradients with a decay per channel (Kimi Delta Attention, arXiv 2510.26692). The
// equations are those of backward/kernel.cuh, but each channel of k has its own Gam_ij, inside the sums over
// channels.
//
// A CTA has a chunk and a head of q and k. After the products between blocks of 16 rows, a thread has one
// channel of a block. Row by row, it updates the product of decays and adds the terms between the rows of the
// block.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/channels/products.cuh>

namespace flashinfer::cuda {

template <typename Shape>
struct DeltaChannelGradients : DeltaChannelProducts<Shape> {
  using Base = DeltaChannelProducts<Shape>;
  using T = typename Shape::T;
  using typename Base::Cursor, typename Base::Rows, typename Base::Shared;
  using KeyRows = Swizzle<2 * Shape::kKeys, kDeltaChunk>;
  static constexpr int kKeys = Shape::kKeys, kThreads = Shape::kThreads, kBlocks = Shared::kBlocks;
  static constexpr int kTasks = kBlocks * kKeys / kThreads;  // per thread: one channel of 16 rows
  using Base::Base;
  using Base::in, Base::p, Base::shared, Base::workspace, Base::thread, Base::grid;

  // Multiply rows by the decays of their blocks, and compute the decay of each block.
  __device__ __forceinline__ void scale_rows(const Cursor& at) const {
#pragma unroll 1
    for (int task = 0; task < kTasks; ++task) {
      const int block = block_of(task);
      float a[16], product = 1;
      load_decays(a, at, block);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int row = 16 * block + i;
        product *= a[i];
        element(shared.read_k, row, channel()) = from_float<T>(product * to_float(element(shared.k, row, channel())));
        element(shared.read_q, row, channel()) = from_float<T>(product * to_float(element(shared.q, row, channel())));
      }
      shared.block_decay[block][channel()] = product;
      product = 1;
#pragma unroll
      for (int i = 15; i >= 0; --i) {
        const int row = 16 * block + i;
        element(shared.update_k, row, channel()) = from_float<T>(product * to_float(element(shared.k, row, channel())));
        product *= a[i];
      }
    }
  }
  // Turn sums into gradients, in this thread's channels.
  __device__ __forceinline__ void finish_channels(const Cursor& at) const {
#pragma unroll 1
    for (int task = 0; task < kTasks; ++task) {
      const int block = block_of(task), number = DeltaMatrices::block(block, block);
      const uint32_t p_start = ptx::shared_address(shared.p[number]), x_start = ptx::shared_address(shared.x[number]);
      float a[16], w[16], decay = 1;
      load_decays(a, at, block);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int row = 16 * block + i;
        float p_row[16], x_row[16];
        load_local(p_row, p_start, i), load_local(x_row, x_start, i);
        const float k = to_float(element(shared.k, row, channel()));
        decay *= a[i];
        float dq = decay * shared.dq[row][channel()] + p_row[i] * k;
        float read = decay * shared.dk_row[row][channel()];
#pragma unroll
        for (int j = 0; j < i; ++j) w[j] *= a[i], dq += p_row[j] * w[j], read += x_row[j] * w[j];
        w[i] = k;
        shared.dq[row][channel()] = dq, shared.dk_row[row][channel()] = read;
      }
      decay = 1;
      float row_dot = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) w[i] = 0;  // w[j] is now the gradient of row j from later rows
#pragma unroll
      for (int i = 15; i >= 0; --i) {
        const int row = 16 * block + i;
        float p_row[16], x_row[16];
        load_local(p_row, p_start, i), load_local(x_row, x_start, i);
        const float k = to_float(element(shared.k, row, channel())), q = to_float(element(shared.q, row, channel()));
        const float dq = shared.dq[row][channel()], read = shared.dk_row[row][channel()];
        const float col = decay * shared.dk_col[row][channel()] + w[i] + p_row[i] * q;
        row_dot += q * dq + k * (read - col);
        shared.dk_col[row][channel()] = row_dot;
        shared.dk_row[row][channel()] = read + col;
#pragma unroll
        for (int j = 0; j < i; ++j) w[j] = a[i] * (w[j] + p_row[j] * q + x_row[j] * k);
        decay *= a[i];
      }
      shared.after[block][channel()] = row_dot;
    }
  }
  // Add the value heads of a group through gmem. An element has the same thread for every value head, so the
  // sums in gmem need no barrier.
  __device__ __forceinline__ void add_members(const Cursor& at) const {
    float* sums = workspace.sums + static_cast<int64_t>(at.item) * kDeltaChunk * (2 * kKeys) + channel();
#pragma unroll 4
    for (int row = thread / kKeys; row < kDeltaChunk; row += kThreads / kKeys) {
      float &dq = shared.dq[row][channel()], &dk = shared.dk_row[row][channel()];
      float* to = sums + row * (2 * kKeys);
      if (at.member > 0) dq += to[0], dk += to[kKeys];
      if (!at.last_member(grid)) to[0] = dq, to[kKeys] = dk;
    }
  }
  __device__ __forceinline__ void store_gates(const Cursor& at) const {
    float state = 0, decay = 1;  // state: <D, S after the chunk>
#pragma unroll
    for (int block = kBlocks - 1; block >= 0; --block)
      state += decay * shared.written[block][channel()], decay *= shared.block_decay[block][channel()];
    float product = 0;
#pragma unroll
    for (int part = 0; part < Shared::kParts; ++part) product += shared.product[part][channel()];
    state += decay * product;
    if (channel() >= in.key_dim) return;
#pragma unroll 1
    for (int task = 0; task < kTasks; ++task) {
      float after = state;
      for (int block = kBlocks - 1; block > block_of(task); --block) after += shared.after[block][channel()];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int row = 16 * block_of(task) + i;
        if (row < at.chunk.count)
          static_cast<float*>(p.grad_gk)[token(row, at) * in.key_dim + channel()] =
              after + shared.dk_col[row][channel()];
      }
    }
  }
  __device__ __forceinline__ void store(const Cursor& at) const {
    store(p.grad_q, at, shared.dq, shared.q, shared.factors.q_factor);
    store(p.grad_k, at, shared.dk_row, shared.k, shared.factors.k_factor);
  }

 private:
  __device__ __forceinline__ int channel() const { return thread % kKeys; }
  __device__ __forceinline__ int block_of(int task) const { return thread / kKeys + task * (kThreads / kKeys); }
  __device__ __forceinline__ int64_t token(int i, const Cursor& at) const {
    return (at.chunk.batch * in.num_tokens + at.chunk.first + i) * in.num_value_heads + at.value_head(grid);
  }
  // Return an element of a tile of rows.
  __device__ __forceinline__ static T& element(Rows& tile, int row, int channel) {
    const uint32_t at = KeyRows::chunk(KeyRows::row(0, row), channel / 8) + channel % 8 * 2;
    return *reinterpret_cast<T*>(reinterpret_cast<char*>(&tile) + at);
  }
  // Load the decays of this thread's channel in a block.
  __device__ __forceinline__ void load_decays(float (&a)[16], const Cursor& at, int block) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = 16 * block + i;
      const bool inside = row < at.chunk.count && channel() < in.key_dim;
      a[i] = inside ? load_float<float>(in.gk, token(row, at) * in.key_dim + channel()) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i] = ptx::ex2_approx(a[i] * 1.4426950408889634f);
  }

  // Load row i of a diagonal block, up to the diagonal.
  __device__ __forceinline__ static void load_local(float (&to)[16], uint32_t start, int i) {
#pragma unroll
    for (int part = 0; part <= i / 8; ++part) {
      const uint4 eight = ptx::load_shared_16(start + (8 * (i / 8 * 2 + part) + i % 8) * 16);
      const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) unpack<T>(pairs[e], to[8 * part + 2 * e], to[8 * part + 2 * e + 1]);
    }
  }
  // Store dq or dk with four threads per row, and differentiate the normalisation.
  __device__ __forceinline__ void store(void* to, const Cursor& at, const typename Shared::Sums& sums, const Rows& tile,
                                        const float (&factors)[kDeltaChunk]) const {
    const int row = thread / 4;
    const uint32_t start = KeyRows::row(ptx::shared_address(tile), row);
    const int64_t token = (at.chunk.batch * in.num_tokens + at.chunk.first + row) * in.num_heads + at.qk_head;
    float row_dot = 0;
    if (in.l2norm) {
#pragma unroll
      for (int i = 0; i < kKeys / 32; ++i) {
        const int unit = thread % 4 + 4 * i;
        float x[8];
        load_eight(x, start, unit);
#pragma unroll
        for (int e = 0; e < 8; ++e) row_dot += x[e] * sums[row][8 * unit + e];
      }
      row_dot = quad_sum(row_dot) * factors[row] * factors[row];
    }
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      const int unit = thread % 4 + 4 * i;
      float x[8];
      load_eight(x, start, unit);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = sums[row][8 * unit + e] - row_dot * x[e];
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
  extern __shared__ __align__(1024) unsigned char memory[];
  using Shared = DeltaChannelGradientsShared<Shape>;
  auto& shared = *reinterpret_cast<Shared*>(memory);
  static_assert(sizeof(shared) <= 163 * 1024, "fits the smem of 8.0");
  wait_for_inputs();
  if (threadIdx.x == 0) {  // one copy in smem for all threads
    shared.workspace = DeltaBackwardWorkspace(p.in, Shape::kKeys, chunks, p.workspace);
    shared.grid = GradientGrid(p.in, chunks, shared.workspace.strips / DeltaGradientStage<Shape>::kStrips);
  }
  __syncthreads();
  const GradientGrid& grid = shared.grid;
  GradientCursor at(p.in, grid);
  if (at.done(grid)) return;
  using Gradients = DeltaChannelGradients<Shape>;
  Gradients(p, shared).load_keys(at);
  for (; at.member < grid.group; ++at.member) {
    __syncthreads();  // all threads have read the previous value head
    Gradients(p, shared).load_factors(at);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    Gradients(p, shared).scale_rows(at);
    typename Gradients::GradientSums sums;
    float product[8] = {};
    for (at.slice = 0; at.slice < grid.slices; ++at.slice) Gradients(p, shared).add_slice(at, sums, product);
    Gradients(p, shared).finish_products(at, static_cast<float>(p.in.scale.get()), sums, product);
    Gradients(p, shared).finish_channels(at);
    __syncthreads();
    if (grid.group > 1) Gradients(p, shared).add_members(at);
    if (p.grad_gk) Gradients(p, shared).store_gates(at);
  }
  __syncthreads();
  Gradients(p, shared).store(at);
}

}  // namespace flashinfer::cuda
