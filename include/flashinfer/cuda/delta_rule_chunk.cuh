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

// Launches a kernel that wants more shared memory than any has without asking. False: this binary has none for the
// device.
template <auto kKernel, bool kHopper, typename... Args>
bool launch_wide(int64_t blocks, int threads, int shared_bytes, const Launch& where, const Args&... args) {
  static PerDevice<bool> found;
  const bool there = found.get(where.device, [shared_bytes](int device) {
    if (kHopper) {
      cudaFuncAttributes attributes{};
      if (attribute(cudaDevAttrComputeCapabilityMajor, device) != 9) return false;
      check(cudaFuncGetAttributes(&attributes, kKernel), "cudaFuncGetAttributes");
      if (attributes.sharedSizeBytes == 0) return false;
    }
    check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          "cudaFuncSetAttribute");
    return true;
  });
  if (there) launch(kKernel, static_cast<unsigned>(blocks), threads, shared_bytes, where, args...);
  return there;
}
template <auto kKernel, typename Shape, typename Stage, typename... Args>
bool launch_walk(const DeltaRuleInputs& in, const Launch& where, const Args&... args) {
  return launch_wide<kKernel, Shape::kHopper>(delta_blocks(in, Shape::kColumns), Shape::kThreads,
                                              kWalkBytes<Shape, Stage>, where, args...);
}

// Calls body with the shape of blocks that walk, until it returns true: what this binary and the device have. The more
// columns a block has, the less it reads; the fewer, the more processors have one.
template <typename T, int kKeys, typename Body>
void with_walk_shape(const DeltaRuleInputs& in, const Launch& where, const Body& body) {
  const int64_t wanted = device_info(where.device).num_sms * 3 / 4;
  const bool wide = in.value_dim > 64 && delta_blocks(in, 128) >= wanted;
  if (wide ? body(DeltaGroupShape<T, kKeys, 2>{}) : body(DeltaGroupShape<T, kKeys, 1>{})) return;
  if (wide) {
    body(DeltaWalkShape<T, kKeys, 8, 0>{});
  } else if (in.value_dim > 32 && delta_blocks(in, 64) >= wanted) {
    body(DeltaWalkShape<T, kKeys, 4, 0>{});
  } else {
    body(DeltaWalkShape<T, kKeys, 2, 2>{});
  }
}

template <typename T, int kKeys>
void launch_delta_prepare(const DeltaRuleInputs& in, DeltaTerms* terms, const Launch& where) {
  const auto blocks = static_cast<unsigned>(count_chunks(in) * in.num_value_heads);
  launch(delta_prepare_kernel<T, kKeys>, blocks, DeltaPrepare<T, kKeys>::kThreads, 0, where, in, terms);
}

template <typename T, int kKeys>
void delta_rule_chunks(const DeltaRuleParams& p, const Launch& stream) {
  const Launch where{stream.stream, stream.device, 0};  // each kernel reads what the one before it wrote
  launch_delta_prepare<T, kKeys>(p.in, static_cast<DeltaTerms*>(p.workspace), where);
  with_walk_shape<T, kKeys>(p.in, where, [&](auto shape) {
    using Shape = decltype(shape);
    return launch_walk<delta_chain_kernel<Shape>, Shape, DeltaChainStage<Shape>>(p.in, where, p);
  });
}

template <typename T>
void delta_rule_chunks(const DeltaRuleParams& p, const Launch& where) {
  if constexpr (kIsHalfType<T>) {
    p.in.key_dim <= 64 ? delta_rule_chunks<T, 64>(p, where) : delta_rule_chunks<T, 128>(p, where);
  }
}

}  // namespace flashinfer::cuda
