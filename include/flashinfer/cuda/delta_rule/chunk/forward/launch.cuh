// Dispatch and launches of the chunk form's forward pass on CUDA.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/channels/prepare.cuh>
#include <flashinfer/cuda/delta_rule/chunk/forward/split.cuh>
#include <flashinfer/cuda/delta_rule/chunk/forward/split_warpgroups.cuh>
#include <flashinfer/cuda/delta_rule/chunk/prepare.cuh>
#include <flashinfer/cuda/host/kernel.cuh>

namespace flashinfer::cuda {

// Smem per CTA that a GPU must have for the chunk kernels. GPUs of compute capability 8.0 have as much. GPUs
// of 8.6 have less, and use the recurrent kernel.
constexpr int kChunkSharedBytes = 163 << 10;

// Return true if the chunk kernels serve the call: in.chunked is set, types have 16 bits, beta is a scalar,
// key_dim is at most 256 (128 with gk), smem suffices, sizes and addresses allow copies of 16 bytes, and
// sequences have at least a chunk of tokens on average.
template <typename T>
bool supports_chunks(const DeltaRuleInputs& in, const Launch& where) {
  if constexpr (!kIsHalfType<T>) return false;
  const auto aligned = [](const void* rows) { return reinterpret_cast<uintptr_t>(rows) % 16 == 0; };
  const auto copies_by_16 = [&](const void* rows, const TokenStrides& strides) {
    return aligned(rows) && strides.batch % 8 == 0 && strides.token % 8 == 0 && strides.head % 8 == 0;
  };
  return in.chunked && device_info(where.device).shared_bytes >= kChunkSharedBytes && aligned(in.gk) &&
         !in.beta_is_vector && in.key_dim <= (in.gk ? 128 : 256) && in.key_dim % 8 == 0 && in.value_dim % 8 == 0 &&
         copies_by_16(in.q, in.q_strides) && copies_by_16(in.k, in.k_strides) && copies_by_16(in.v, in.v_strides) &&
         in.batch_size * in.num_tokens >= kDeltaChunk * in.num_sequences;
}

// The workspace has the terms of all chunks, then their ready flags.
inline int64_t delta_terms_bytes(const DeltaRuleInputs& in) {
  return count_chunks(in) * in.num_value_heads * delta_term_bytes(in);
}
inline int64_t delta_chunk_workspace(const DeltaRuleInputs& in) {
  return delta_terms_bytes(in) + count_chunks(in) * in.num_value_heads * static_cast<int64_t>(sizeof(uint32_t));
}

template <auto kKernel, typename... Args>
void launch_chunks(int64_t blocks, int threads, int64_t shared_bytes, const Launch& where, const Args&... args) {
  Kernel<kKernel>::launch(static_cast<unsigned>(blocks), threads, shared_bytes, where, args...);
}
template <auto kKernel, typename Shape, typename Stage, typename... Args>
void launch_scan(const DeltaRuleInputs& in, const Launch& where, const Args&... args) {
  static_assert(Shape::kWgmma || kScanBytes<Shape, Stage> <= kChunkSharedBytes);
  launch_chunks<kKernel>(delta_blocks(in, Shape::kColumns), Shape::kThreads, kScanBytes<Shape, Stage>, where, args...);
}

// Call body with a DeltaWarpShape. Wider CTAs read less. Narrower ones occupy more SMs.
template <typename T, int kKeys, bool kChannels, typename Body>
void with_warp_shape(const DeltaRuleInputs& in, const Launch& where, const Body& body) {
  const int64_t enough = device_info(where.device).num_sms * 3 / 4;
  if (in.value_dim > 64 && delta_blocks(in, 128) >= enough) return body(DeltaWarpShape<T, kKeys, 8, 0, kChannels>{});
  if (in.value_dim > 32 && delta_blocks(in, 64) >= enough) return body(DeltaWarpShape<T, kKeys, 4, 0, kChannels>{});
  body(DeltaWarpShape<T, kKeys, 2, kChannels ? 0 : 2, kChannels>{});
}
// Call body with a CTA shape: on 9.0, the narrowest that has all columns or whose CTAs run in one wave,
// otherwise the widest. Times on an H200 gave this rule.
template <typename T, int kKeys, typename Body>
void with_scan_shape(const DeltaRuleInputs& in, const Launch& where, const Body& body) {
  const int64_t num_sms = device_info(where.device).num_sms;
  if (serves_sm90a(where.device)) {
    if (in.value_dim <= 32 || delta_blocks(in, 32) <= num_sms) return body(DeltaWarpShape<T, kKeys, 2, 2>{});
    if (in.value_dim <= 64 || delta_blocks(in, 64) <= num_sms) return body(DeltaWarpgroupShape<T, kKeys, 1>{});
    return body(DeltaWarpgroupShape<T, kKeys, 2>{});
  }
  with_warp_shape<T, kKeys, false>(in, where, body);
}

template <typename T, int kKeys>
void launch_delta_prepare(const DeltaRuleInputs& in, DeltaTerms* terms, const Launch& where) {
  const auto blocks = static_cast<unsigned>(count_chunks(in) * in.num_value_heads);
  launch_chunks<delta_prepare_kernel<T, kKeys>>(blocks, DeltaPrepare<T, kKeys>::kThreads,
                                                sizeof(DeltaPrepareShared<kKeys>), where, in, terms);
}

// Return false if the device has too little smem.
template <typename Shape>
bool launch_delta_split(const DeltaRuleParams& p, const Launch& where) {
  constexpr int kBytes = sizeof(DeltaSplitShared<Shape>);
  if (kBytes > device_info(where.device).shared_bytes) return false;
  launch_chunks<delta_split_kernel<Shape>>(delta_blocks(p.in, Shape::kColumns), Shape::kThreads, kBytes, where, p);
  return true;
}

// Return the number of CTAs that prepare terms while others scan, or 0 if preparing all terms first is
// faster. On an H200, an SM prepares a chunk in 3.8 us, and a scan step takes 1.4 us.
template <typename Shape>
int64_t delta_preparing_blocks(const DeltaRuleInputs& in, const Launch& where) {
  const int64_t num_sms = device_info(where.device).num_sms, scanning = delta_blocks(in, Shape::kColumns);
  const int64_t idle_sms = num_sms - scanning, heads = in.num_sequences * in.num_value_heads;
  const bool has_equal_lengths = !in.cu_seqlens.data;
  return has_equal_lengths && scanning > 0 && idle_sms > 0 && heads * 38 <= idle_sms * 14 &&
                 in.num_tokens >= 4 * kDeltaChunk
             ? idle_sms
             : 0;
}
template <typename Shape>
void launch_delta_split_warpgroups(const DeltaRuleParams& p, int64_t preparing, const Launch& where) {
  auto* flags = reinterpret_cast<uint32_t*>(static_cast<char*>(p.workspace) + delta_terms_bytes(p.in));
  if (preparing > 0) {
    const auto bytes = static_cast<size_t>(count_chunks(p.in) * p.in.num_value_heads) * sizeof(uint32_t);
    check(cudaMemsetAsync(flags, 0, bytes, static_cast<cudaStream_t>(where.stream)), "cudaMemsetAsync");
  }
  launch_chunks<delta_split_warpgroups_kernel<Shape>>(preparing + delta_blocks(p.in, Shape::kColumns), Shape::kThreads,
                                                      sizeof(DeltaSplitWarpgroupShared<Shape>), where, p,
                                                      DeltaTermFlags{static_cast<uint32_t>(preparing), flags});
}

template <typename T, int kKeys>
void delta_rule_chunks(const DeltaRuleParams& p, const Launch& where) {
  const Launch serial{where.stream, where.device, 0};  // no PDL: each kernel reads the output of the previous one
  with_scan_shape<T, kKeys>(p.in, serial, [&](auto shape) {
    using Shape = decltype(shape);
    using Warpgroups = DeltaSplitWarpgroupShape<T, kKeys>;
    // With few columns and few keys, mma.sync is faster than wgmma.
    const bool on_warpgroups = Shape::kWgmma || (kKeys > 64 && p.in.value_dim > 32 && serves_sm90a(serial.device));
    const int64_t preparing = on_warpgroups ? delta_preparing_blocks<Warpgroups>(p.in, serial) : 0;
    if (preparing == 0) launch_delta_prepare<T, kKeys>(p.in, static_cast<DeltaTerms*>(p.workspace), serial);
    if (on_warpgroups) {
      launch_delta_split_warpgroups<Warpgroups>(p, preparing, serial);
    } else if constexpr (!Shape::kWgmma) {
      if constexpr (Shape::kLoaders > 0) {
        if (launch_delta_split<DeltaSplitShape<T, kKeys>>(p, serial)) return;
      }
      launch_scan<delta_forward_kernel<Shape>, Shape, DeltaForwardStage<Shape>>(p.in, serial, p);
    }
  });
}

// Launch with key dimensions from 129 to 256: one warp cannot hold the state in registers.
template <typename T>
void delta_rule_wide_chunks(const DeltaRuleParams& p, const Launch& where) {
  const Launch serial{where.stream, where.device, 0};
  using Warpgroups = DeltaWarpgroupShape<T, 256, 2>;
  using Warps = DeltaWarpShape<T, 256, 4, 0>;
  launch_delta_prepare<T, 256>(p.in, static_cast<DeltaTerms*>(p.workspace), serial);
  if (serves_sm90a(serial.device)) {
    launch_scan<delta_forward_kernel<Warpgroups>, Warpgroups, DeltaForwardStage<Warpgroups>>(p.in, serial, p);
  } else {
    launch_scan<delta_forward_kernel<Warps>, Warps, DeltaForwardStage<Warps>>(p.in, serial, p);
  }
}

template <typename T, int kKeys>
void launch_delta_prepare_channels(const DeltaRuleInputs& in, void* terms, const Launch& where) {
  launch_chunks<delta_prepare_channels_kernel<T, kKeys>>(
      count_chunks(in) * in.num_value_heads, DeltaPrepareChannels<T, kKeys>::kThreads,
      sizeof(DeltaChannelShared<kKeys>), where, in, static_cast<DeltaChannelTerms<kKeys>*>(terms));
}

// Launch with a decay per channel of k.
template <typename T, int kKeys>
void delta_rule_channels(const DeltaRuleParams& p, const Launch& where) {
  const Launch serial{where.stream, where.device, 0};
  launch_delta_prepare_channels<T, kKeys>(p.in, p.workspace, serial);
  if (serves_sm90a(serial.device))
    return launch_delta_split_warpgroups<DeltaSplitWarpgroupShape<T, kKeys, true>>(p, 0, serial);
  with_warp_shape<T, kKeys, true>(p.in, serial, [&](auto shape) {
    using Shape = decltype(shape);
    launch_scan<delta_forward_kernel<Shape>, Shape, DeltaForwardStage<Shape>>(p.in, serial, p);
  });
}
template <typename T>
void delta_rule_channels(const DeltaRuleParams& p, const Launch& where) {
  p.in.key_dim <= 64 ? delta_rule_channels<T, 64>(p, where) : delta_rule_channels<T, 128>(p, where);
}

// Launch with one decay for all channels, or none.
template <typename T>
void delta_rule_chunks(const DeltaRuleParams& p, const Launch& where) {
  p.in.key_dim <= 64 ? delta_rule_chunks<T, 64>(p, where) : delta_rule_chunks<T, 128>(p, where);
}

}  // namespace flashinfer::cuda
