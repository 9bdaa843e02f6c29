// Launches of the chunk gradients on CUDA: terms of the chunks, both scans, then the gradients of each chunk.
#pragma once

#include <algorithm>

#include <flashinfer/cuda/delta_rule/chunk/backward/kernel.cuh>
#include <flashinfer/cuda/delta_rule/chunk/backward/split_scan.cuh>
#include <flashinfer/cuda/delta_rule/chunk/channels/gradients.cuh>
#include <flashinfer/cuda/delta_rule/chunk/forward/launch.cuh>

namespace flashinfer::cuda {

template <typename T>
bool supports_chunks(const DeltaRuleBackwardParams& p, const Launch& where) {
  return supports_chunks<T>(p.in, where) && !(p.in.g && p.in.gk) && p.grad_o &&
         reinterpret_cast<uintptr_t>(p.grad_o) % 16 == 0;
}

inline int64_t delta_chunk_backward_workspace(const DeltaRuleInputs& in) {
  const DeltaBackwardWorkspace workspace(in,
                                         in.key_dim <= 64    ? 64
                                         : in.key_dim <= 128 ? 128
                                                             : 256,
                                         count_chunks(in), nullptr);
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(workspace.end));
}

// Return false if the device has too little smem.
template <typename Scans>
bool launch_delta_split_scans(const DeltaRuleBackwardParams& p, int64_t chunks, const Launch& where) {
  if (Scans::kBytes > device_info(where.device).shared_bytes) return false;
  launch_chunks<delta_split_backward_scans_kernel<Scans>>(2 * delta_blocks(p.in, Scans::kColumns), Scans::kThreads,
                                                          Scans::kBytes, where, p, chunks);
  return true;
}

template <typename T, int kKeys>
void delta_rule_chunks_backward(const DeltaRuleBackwardParams& p, const Launch& where) {
  const Launch serial{where.stream, where.device, 0};  // no PDL: each kernel reads the output of the previous one
  const int64_t chunks = count_chunks(p.in);
  launch_delta_prepare<T, kKeys>(p.in, DeltaBackwardWorkspace(p.in, kKeys, chunks, p.workspace).terms, serial);
  with_scan_shape<T, kKeys>(p.in, serial, [&](auto shape) {
    using Shape = decltype(shape);
    if constexpr (Shape::kLoaders > 0 && !Shape::kWgmma) {
      if (launch_delta_split_scans<DeltaSplitScans<T, kKeys>>(p, chunks, serial)) return;
    }
    static_assert(Shape::kWgmma || kBothScansBytes<Shape> <= kChunkSharedBytes);
    launch_chunks<delta_backward_scans_kernel<Shape>>(2 * delta_blocks(p.in, Shape::kColumns), Shape::kThreads,
                                                      kBothScansBytes<Shape>, serial, p, chunks);
  });
  const int64_t items = chunks * p.in.num_heads;
  const auto launch_shape = [&](auto shape, int64_t blocks) {
    using Shape = decltype(shape);
    static_assert(Shape::kWgmma || sizeof(DeltaGradientsShared<Shape>) <= kChunkSharedBytes);
    launch_chunks<delta_gradients_kernel<Shape>>(blocks, Shape::kThreads, sizeof(DeltaGradientsShared<Shape>), serial,
                                                 p, chunks);
  };
  if (serves_sm90a(serial.device)) {
    launch_shape(DeltaGradientShape<T, kKeys, true>{}, std::min<int64_t>(items, device_info(serial.device).num_sms));
  } else {
    launch_shape(DeltaGradientShape<T, kKeys, false>{}, items);
  }
}

// Key dimensions from 129 to 256, more than one warp holds in registers.
template <typename T>
struct DeltaWideShape : DeltaWarpgroupShape<T, 256, 2> {
  static constexpr int kPartTokens = 16;  // the staging blocks leave no smem for more
};
template <typename T>
void delta_rule_wide_chunks_backward(const DeltaRuleBackwardParams& p, const Launch& where) {
  const Launch serial{where.stream, where.device, 0};
  const int64_t chunks = count_chunks(p.in), items = chunks * p.in.num_heads;
  launch_delta_prepare<T, 256>(p.in, static_cast<DeltaTerms*>(p.workspace), serial);
  const auto run = [&](auto shape, auto gradients, int64_t blocks) {
    using Shape = decltype(shape);
    using Gradients = decltype(gradients);
    static_assert(Shape::kWgmma || kBothScansBytes<Shape> <= kChunkSharedBytes);
    launch_chunks<delta_backward_scans_kernel<Shape>>(2 * delta_blocks(p.in, Shape::kColumns), Shape::kThreads,
                                                      kBothScansBytes<Shape>, serial, p, chunks);
    static_assert(Gradients::kWgmma || sizeof(DeltaGradientsShared<Gradients>) <= kChunkSharedBytes);
    launch_chunks<delta_gradients_kernel<Gradients>>(blocks, Gradients::kThreads,
                                                     sizeof(DeltaGradientsShared<Gradients>), serial, p, chunks);
  };
  if (serves_sm90a(serial.device)) {
    run(DeltaWideShape<T>{}, DeltaGradientShape<T, 128, true, 2>{},
        std::min<int64_t>(items, device_info(serial.device).num_sms));
  } else {
    run(DeltaWarpShape<T, 256, 4, 0>{}, DeltaGradientShape<T, 64, false, 4>{}, items);
  }
}

// Launch with a decay per channel of k.
template <typename T, int kKeys>
void delta_rule_channels_backward(const DeltaRuleBackwardParams& p, const Launch& where) {
  const Launch serial{where.stream, where.device, 0};
  const int64_t chunks = count_chunks(p.in);
  launch_delta_prepare_channels<T, kKeys>(p.in, p.workspace, serial);
  const auto scan = [&](auto shape) {
    using Shape = decltype(shape);
    static_assert(Shape::kWgmma || kBothScansBytes<Shape> <= kChunkSharedBytes);
    launch_chunks<delta_backward_scans_kernel<Shape>>(2 * delta_blocks(p.in, Shape::kColumns), Shape::kThreads,
                                                      kBothScansBytes<Shape>, serial, p, chunks);
  };
  using Group = DeltaWarpgroupShape<T, kKeys, 1, true>;
  if (!serves_sm90a(serial.device)) {
    with_warp_shape<T, kKeys, true>(p.in, serial, scan);
  } else if (p.in.value_dim <= 64 || delta_blocks(p.in, 64) <= device_info(serial.device).num_sms) {
    scan(Group{});
  } else {
    scan(DeltaWarpgroupShape<T, kKeys, 2, true>{});
  }
  using Gradients = DeltaChannelGradientShape<T, kKeys>;
  static_assert(sizeof(DeltaChannelGradientsShared<Gradients>) <= kChunkSharedBytes);
  launch_chunks<delta_channel_gradients_kernel<Gradients>>(
      chunks * p.in.num_heads, Gradients::kThreads, sizeof(DeltaChannelGradientsShared<Gradients>), serial, p, chunks);
}
template <typename T>
void delta_rule_channels_backward(const DeltaRuleBackwardParams& p, const Launch& where) {
  p.in.key_dim <= 64 ? delta_rule_channels_backward<T, 64>(p, where) : delta_rule_channels_backward<T, 128>(p, where);
}

template <typename T>
void delta_rule_chunks_backward(const DeltaRuleBackwardParams& p, const Launch& where) {
  p.in.key_dim <= 64 ? delta_rule_chunks_backward<T, 64>(p, where) : delta_rule_chunks_backward<T, 128>(p, where);
}

}  // namespace flashinfer::cuda
