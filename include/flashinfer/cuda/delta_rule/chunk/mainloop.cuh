// Mainloops of the scans over chunks: pipelines of copies and products, on warps and on warpgroups.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/scan.cuh>
#include <flashinfer/cuda/tile/ring.cuh>

namespace flashinfer::cuda {

// Scan the chunks in order, or from the last to the first. Load the state from `from` and store it to `to`.
// Both may be null.
template <typename Shape, bool kBackwards, typename Scan, typename Stage>
__device__ __forceinline__ void scan_on_warps(const Scan& scan, Stage* stages, const void* from, void* to) {
  const int64_t count = scan.num_chunks();
  const auto number = [&](int64_t i) { return kBackwards ? count - 1 - i : i; };
  const bool copies = Shape::kLoaders == 0 || !scan.computes();
  constexpr int kStages = kScanStages<Shape, Stage>, kAhead = kStages - 1;
  static_assert(kStages >= 2, "one stage is copied while another is computed");
  const auto load = [&](int64_t i) {
    if (i < count) scan.load(stages[i % kStages], number(i));
    ptx::cp_async_commit();
  };
  // If this warp `loads`, wait for the copies of chunk i and issue those of chunk i + kAhead.
  const auto acquire_stage = [&](int64_t i, bool loads) {
    if (loads) ptx::cp_async_wait<kAhead - 1>();
    __syncthreads();  // all threads have also read the stage of the previous chunk
    if (loads) load(i + kAhead);
  };
  if (copies)
    for (int64_t i = 0; i < kAhead; ++i) load(i);
  if (Shape::kLoaders > 0 && copies) {
    for (int64_t i = 0; i < count; ++i) acquire_stage(i, true);
    return;
  }
  typename Scan::State state;
  state.clear();
  if (from) scan.for_state_elements(state, [&](float& one, int64_t i) { one = static_cast<const float*>(from)[i]; });
  for (int64_t i = 0; i < count; ++i) {
    acquire_stage(i, Shape::kLoaders == 0);
    scan.advance(stages[i % kStages], number(i), state);
  }
  if (to) scan.for_state_elements(state, [&](float& one, int64_t i) { static_cast<float*>(to)[i] = one; });
}

// Clear the matrices of all stages. Copies never overwrite the zeros above the diagonal.
template <typename Shape, typename Stage>
__device__ __forceinline__ void clear_terms(Stage* stages, int count) {
  constexpr int kUnits = sizeof(typename decltype(stages->terms)::Matrices) / 16;
  for (int i = threadIdx.x; i < count * kUnits; i += Shape::kThreads)
    (&stages[i / kUnits].terms.z[0][0])[i % kUnits] = make_uint4(0, 0, 0, 0);
}

// Scan the chunks on warpgroups. Consumers wait for full stages. The producer warpgroup waits for empty
// ones.
template <typename Shape, bool kBackwards, typename Scan, typename Stage>
__device__ __forceinline__ void scan_on_warpgroups(const Scan& scan, Stage* stages, const void* from, void* to) {
  constexpr int kStages = kScanStages<Shape, Stage>;
  static_assert(kStages >= 2, "one stage is copied while another is computed");
  __shared__ uint64_t barriers[2 * kStages];
  const Ring<kStages> ring{ptx::shared_address(barriers)};
  if (threadIdx.x == 0) ring.init(Shape::kCopiers, Shape::kWarps), ptx::mbarrier_fence_init();
  clear_terms<Shape>(stages, kStages);
  ptx::fence_proxy_async();
  __syncthreads();
  const int count = static_cast<int>(scan.num_chunks());
  const auto number = [&](int i) { return kBackwards ? count - 1 - i : i; };
  if (!scan.computes()) {
    if constexpr (Shape::kComputeRegisters > 0) ptx::setmaxnreg_dec<Shape::kLoadRegisters>();
    for (int i = 0; i < count; ++i) {
      ring.wait_empty(i);
      scan.load(stages[i % kStages], number(i));
      ptx::mbarrier_arrive_after_cp_async(ring.full(i));
    }
    ptx::cp_async_wait<0>();
  } else {
    if constexpr (Shape::kComputeRegisters > 0) ptx::setmaxnreg_inc<Shape::kComputeRegisters>();
    typename Scan::State state;
    state.clear();
    if (from) scan.for_state_elements(state, [&](float& one, int64_t i) { one = static_cast<const float*>(from)[i]; });
    for (int i = 0; i < count; ++i) {
      ring.wait_full(i);
      ptx::fence_proxy_async();  // wgmma reads tiles that cp.async wrote through the generic proxy
      scan.advance(stages[i % kStages], number(i), state);
      // One lane arrives for its warp, after the reads of all lanes. Racecheck does not understand this and
      // reports races with the next copies. If every lane arrives, it reports none.
      __syncwarp();
      if (scan.lane == 0) ring.release(i);
    }
    if constexpr (Stage::kTailBytes > 0) ptx::bulk_wait<0>();
    if (to) scan.for_state_elements(state, [&](float& one, int64_t i) { static_cast<float*>(to)[i] = one; });
  }
}

// Return true if kernels of a shape are compiled for this architecture. 9.0a has the shapes on warpgroups,
// and also narrow CTAs on warps, because warpgroups would leave SMs idle in small calls. Other architectures
// have the shapes on warps.
template <typename Shape>
__device__ __forceinline__ constexpr bool is_compiled() {
#if !defined(__CUDA_ARCH__)
  return true;
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  return Shape::kLoaders > 0;
#else
  return !Shape::kWgmma;
#endif
}

template <typename Shape, bool kBackwards, typename Scan, typename Stage>
__device__ __forceinline__ void scan_chunks(const Scan& scan, Stage* stages, const void* from, void* to) {
  if constexpr (is_compiled<Shape>()) {
    if constexpr (Shape::kWgmma) {
      scan_on_warpgroups<Shape, kBackwards>(scan, stages, from, to);
    } else {
      scan_on_warps<Shape, kBackwards>(scan, stages, from, to);
    }
  }
}

}  // namespace flashinfer::cuda
