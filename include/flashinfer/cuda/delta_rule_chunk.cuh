// The delta rule on CUDA over chunks of 64 tokens, on tensor cores: which calls it takes, and its two launches.
#pragma once

#include <flashinfer/cuda/delta_chunk_chain.cuh>
#include <flashinfer/cuda/delta_chunk_prepare.cuh>

namespace flashinfer::cuda {

// Whether a call is one for these kernels: rows of q, k and v are copied by 16 bytes, and there are some chunks.
template <typename T>
bool takes_chunks(const DeltaRuleInputs& in) {
  if constexpr (!kIsHalfType<T>) return false;
  const auto whole = [](const void* rows, const TokenStrides& by) {
    return reinterpret_cast<uintptr_t>(rows) % 16 == 0 && by.batch % 8 == 0 && by.token % 8 == 0 && by.head % 8 == 0;
  };
  return in.chunked && !in.gk && !in.beta_is_vector && in.key_dim <= 128 && in.key_dim % 8 == 0 &&
         in.value_dim % 8 == 0 && whole(in.q, in.q_strides) && whole(in.k, in.k_strides) && whole(in.v, in.v_strides) &&
         in.batch_size * in.num_tokens >= kDeltaChunk * in.num_sequences;
}

// Bytes of the terms of all chunks.
inline int64_t delta_chunk_workspace(const DeltaRuleInputs& in) {
  return count_chunks(in) * in.num_value_heads * static_cast<int64_t>(sizeof(DeltaTerms));
}

template <typename Shape>
void launch_delta_chain(const DeltaRuleParams& p, const Launch& where) {
  static PerDevice<bool> allowed;
  allowed.get(where.device, [](int) {
    check(cudaFuncSetAttribute(delta_chain_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               Shape::kSharedBytes),
          "cudaFuncSetAttribute");
    return true;
  });
  const auto blocks = static_cast<unsigned>(delta_blocks(p.in, Shape::kColumns));
  launch(delta_chain_kernel<Shape>, blocks, Shape::kThreads, Shape::kSharedBytes, where, p);
}

template <typename T, int kKeys>
void delta_rule_chunks(const DeltaRuleParams& p, const Launch& stream) {
  const Launch where{stream.stream, stream.device, 0};  // each kernel reads what the one before it wrote
  const DeltaRuleInputs& in = p.in;
  const auto prepared = static_cast<unsigned>(count_chunks(in) * in.num_value_heads);
  launch(delta_prepare_kernel<T, kKeys>, prepared, DeltaPrepare<T, kKeys>::kThreads, 0, where, p);
  // The more columns a block has, the less it reads; the fewer, the more processors have one.
  const int64_t wanted = device_info(where.device).num_sms * 3 / 4;
  if (in.value_dim > 64 && delta_blocks(in, 128) >= wanted)
    return launch_delta_chain<DeltaChainShape<T, kKeys, 8, 0>>(p, where);
  if (in.value_dim > 32 && delta_blocks(in, 64) >= wanted)
    return launch_delta_chain<DeltaChainShape<T, kKeys, 4, 0>>(p, where);
  launch_delta_chain<DeltaChainShape<T, kKeys, 2, 2>>(p, where);
}

template <typename T>
void delta_rule_chunks(const DeltaRuleParams& p, const Launch& where) {
  if constexpr (kIsHalfType<T>) {
    p.in.key_dim <= 64 ? delta_rule_chunks<T, 64>(p, where) : delta_rule_chunks<T, 128>(p, where);
  }
}

}  // namespace flashinfer::cuda
