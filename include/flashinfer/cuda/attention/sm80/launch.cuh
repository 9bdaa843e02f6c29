// Host side of the portable attention kernel: resident CTAs of an instance on a device, and launches.
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

// Launch properties of an instance on a device.
struct Residency {
  int stages = 0, ctas = 0;  // stages per CTA; CTAs resident on all multiprocessors, 0 if a tile does not fit
};

// Return the largest number of stages with which S::kCtasPerSm CTAs fit on a multiprocessor.
template <auto kKernel, typename S>
Residency find_residency(int device) {
  const int cta_limit = device_info(device).shared_bytes;
  const int sm_limit = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  const int reserved = attribute(cudaDevAttrReservedSharedMemoryPerBlock, device);
  int stages = S::kMaxStages;
  while (stages > S::kMinStages && (S::shared_bytes(stages) + reserved) * S::kCtasPerSm > sm_limit) --stages;
  const int bytes = S::shared_bytes(stages);
  if (bytes > cta_limit) return {};
  Kernel<kKernel>::prefer_shared_memory();
  return {stages, Kernel<kKernel>::resident_ctas(device, S::kThreads, bytes)};
}

// Return the residency, computed once per device: attributes and occupancy cost more than a launch.
template <auto kKernel, typename S>
const Residency& residency(int device) {
  static PerDevice<Residency> found;
  return found.get(device, find_residency<kKernel, S>);
}

template <typename Variant, typename S, typename P>
WorkLimits limits_of(int device) {
  constexpr int kStep = S::kKeys * S::kKeyWarps;
  const int ctas = residency<attention_kernel<Variant, S, P>, S>(device).ctas;
  return {S::kRows, ctas / S::kVParts, std::max(256, 2 * kStep), kStep, 0, 0, kUnsplitKeys};
}

// Return the number of KV heads whose items are processed together. With a plan or a small tile, these are
// all heads, so that the longest items come first. Otherwise the keys and values of these heads fit into an
// L2 cache of 32 MiB.
template <typename S, typename P>
int heads_per_section(const P& params) {
  constexpr int64_t kCacheBytes = 32 << 20;
  if (params.items || S::kKeyWarps > 1) return params.num_kv_heads;
  const int64_t bytes = int64_t{params.single.kv_len} * S::kKvBytes;
  int heads = params.num_kv_heads;
  while (heads > 1 && (heads * bytes > kCacheBytes || params.num_kv_heads % heads != 0)) --heads;
  return heads;
}

// Return the number of CTAs: one per item, KV head and part of O.
template <typename S, typename P>
unsigned ctas_of(const P& params, const Residency& resident) {
  if (resident.ctas == 0) throw std::runtime_error("attention: a tile does not fit into this GPU's shared memory");
  const int64_t items = params.items ? params.max_items : params.num_items();
  const int64_t ctas = items * params.num_kv_heads * S::kVParts;
  if (ctas > INT32_MAX) throw std::runtime_error("attention: more than 2147483647 blocks");
  return static_cast<unsigned>(ctas);
}

// Launch the attention kernel, then the merge kernel if there can be merges. kTickets: the attention kernel
// merges the splits of a plan itself.
template <typename Variant, typename S, typename P, bool kTickets = false>
void launch_attention(const P& params, const Launch& where) {
  const Residency& resident = residency<attention_kernel<Variant, S, P, kTickets>, S>(where.device);
  const unsigned ctas = ctas_of<S>(params, resident);
  Kernel<attention_kernel<Variant, S, P, kTickets>>::launch(
      dim3(ctas), dim3(S::kThreads), S::shared_bytes(resident.stages), where, with_tracks(params, ctas, S::kThreads),
      resident.stages, heads_per_section<S>(params));
  if (!kTickets || params.tickets == nullptr) launch_merges<Variant, typename S::Types>(params, where);
}

// The smallest tile, for rows of decode and of short prefills: warps share the keys among them. All tiles fit
// into the 99 KiB of compute capability 8.6, two stages of 24 KiB and 16 KiB of queries for 512 elements of
// 16 bits.
template <typename Types>
using SmallTile = AttentionTile<1, 1,
                                Types::kKvBytes >= 2048  ? 1
                                : Types::kKvBytes >= 768 ? 2
                                                         : 4,
                                Types::kKvBytes <= 256 ? 32 : 16, 3, 2>;

}  // namespace flashinfer::cuda
