// Gradients of the delta rule on CUDA over chunks of 64 tokens, on tensor cores: four launches.
#pragma once

#include <flashinfer/cuda/delta_chunk_gradients.cuh>
#include <flashinfer/cuda/delta_rule_chunk.cuh>

namespace flashinfer::cuda {

template <typename T>
bool takes_chunks(const DeltaRuleBackwardParams& p) {
  return takes_chunks<T>(p.in) && p.grad_o && reinterpret_cast<uintptr_t>(p.grad_o) % 16 == 0;
}

inline int64_t delta_chunk_backward_workspace(const DeltaRuleInputs& in) {
  const DeltaChunkSpace space(in, in.key_dim <= 64 ? 64 : 128, count_chunks(in), nullptr);
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(space.end));
}

template <typename T, int kKeys>
void delta_rule_chunks_backward(const DeltaRuleBackwardParams& p, const Launch& stream) {
  const Launch where{stream.stream, stream.device, 0};  // each kernel reads what the one before it wrote
  const int64_t chunks = count_chunks(p.in);
  launch_delta_prepare<T, kKeys>(p.in, DeltaChunkSpace(p.in, kKeys, chunks, p.workspace).terms, where);
  with_walk_shape<T, kKeys>(p.in, where, [&](auto shape) {
    using Shape = decltype(shape);
    return launch_walk<delta_replay_kernel<Shape>, Shape, DeltaReplayStage<Shape>>(p.in, where, p, chunks) &&
           launch_walk<delta_reverse_kernel<Shape>, Shape, DeltaReverseStage<Shape>>(p.in, where, p, chunks);
  });
  launch_wide<delta_gradients_kernel<T, kKeys>, false>(chunks * p.in.num_heads, DeltaGradients<T, kKeys>::kThreads,
                                                       sizeof(DeltaGradientsShared<kKeys>), where, p, chunks);
}

template <typename T>
void delta_rule_chunks_backward(const DeltaRuleBackwardParams& p, const Launch& where) {
  if constexpr (kIsHalfType<T>) {
    p.in.key_dim <= 64 ? delta_rule_chunks_backward<T, 64>(p, where) : delta_rule_chunks_backward<T, 128>(p, where);
  }
}

}  // namespace flashinfer::cuda
