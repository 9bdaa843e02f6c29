// Attention kernels from the host: how many blocks of an instance a device holds, and launching them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include <flashinfer/attention/config.h>
#include <flashinfer/cuda/attention/merge.cuh>
#include <flashinfer/cuda/attention/shape.cuh>
#include <flashinfer/cuda/attention/sm80/tile.cuh>
#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/host/per_device.cuh>

namespace flashinfer::cuda {

// How one instance runs on a device.
struct Residency {
  int stages = 0, blocks = 0;  // blocks: at one time, on all multiprocessors; 0: it does not fit
};

// As many stages as leave room for S::kBlocks blocks on a multiprocessor.
template <auto kKernel, typename S>
Residency find_residency(int device) {
  const int most = device_info(device).shared_bytes;
  const int all = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  const int reserved = attribute(cudaDevAttrReservedSharedMemoryPerBlock, device);
  int stages = S::kMaxStages;
  while (stages > S::kMinStages && (S::shared_bytes(stages) + reserved) * S::kBlocks > all) --stages;
  const int bytes = S::shared_bytes(stages);
  if (bytes > most) return {};
  Kernel<kKernel>::prefer_shared_memory();
  return {stages, Kernel<kKernel>::resident_ctas(device, S::kThreads, bytes)};
}

// Found once: attributes and occupancy cost more than a launch.
template <auto kKernel, typename S>
const Residency& residency(int device) {
  static PerDevice<Residency> found;
  return found.get(device, find_residency<kKernel, S>);
}

template <typename Variant, typename S, typename P>
WorkLimits limits_of(int device) {
  constexpr int kStep = S::kKeys * S::kKeyWarps;
  const int blocks = residency<attention_kernel<Variant, S, P>, S>(device).blocks;
  return {S::kRows, blocks, std::max(256, 2 * kStep), kStep, 0, 0, kWholeKeys};
}

// How many key heads go through the items together. All of them, so that the longest items of all come first; but one
// request's long keys head by head, as many as the L2 cache holds.
template <typename S, typename P>
int heads_together(const P& params) {
  constexpr int64_t kCacheBytes = 32 << 20;
  if (params.items || S::kKeyWarps > 1) return params.num_kv_heads;
  const int64_t bytes = int64_t{params.single.kv_len} * S::kBytesOfKey;
  int heads = params.num_kv_heads;
  while (heads > 1 && (heads * bytes > kCacheBytes || params.num_kv_heads % heads != 0)) --heads;
  return heads;
}

// One block for each item and key head.
template <typename P>
unsigned blocks_of(const P& params, const Residency& how) {
  if (how.blocks == 0) throw std::runtime_error("attention: a tile does not fit into this GPU's shared memory");
  const int64_t items = params.items ? params.max_items : params.num_items();
  const int64_t blocks = items * params.num_kv_heads;
  if (blocks > INT32_MAX) throw std::runtime_error("attention: more than 2147483647 blocks");
  return static_cast<unsigned>(blocks);
}

// The tile kernel, and the merges where there can be any; kTickets: it does the merges of a plan itself.
template <typename Variant, typename S, typename P, bool kTickets = false>
void launch_attention(const P& params, const Launch& where) {
  const Residency& how = residency<attention_kernel<Variant, S, P, kTickets>, S>(where.device);
  const unsigned blocks = blocks_of(params, how);
  Kernel<attention_kernel<Variant, S, P, kTickets>>::launch(
      dim3(blocks), dim3(S::kThreads), S::shared_bytes(how.stages), where, with_tracks(params, blocks, S::kThreads),
      how.stages, heads_together<S>(params));
  if (!kTickets || params.tickets == nullptr) launch_merges<Variant, typename S::Types>(params, where);
}

// The smallest tile, for rows of decode and of short prefills: warps share the keys among them.
template <typename Types>
using SmallTile = AttentionTile<1, 1, Types::kBytesOfKey >= 1024 ? 2 : 4, Types::kBytesOfKey <= 256 ? 32 : 16, 3, 2>;

}  // namespace flashinfer::cuda
