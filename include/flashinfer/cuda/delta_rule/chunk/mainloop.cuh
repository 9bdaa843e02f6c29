// How blocks of the delta rule walk from chunk to chunk: who waits for whom, on warps and on warpgroups.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/scan.cuh>
#include <flashinfer/cuda/tile/ring.cuh>

namespace flashinfer::cuda {

// Walks from chunk to chunk, or from the last to the first, with a state that comes from `from` and goes to `to`; both
// may be null.
template <typename Shape, bool kBackwards, typename Scan, typename Stage>
__device__ __forceinline__ void scan_on_warps(const Scan& scan, Stage* stages, const void* from, void* to) {
  const int64_t count = scan.num_chunks();
  const auto number = [&](int64_t i) { return kBackwards ? count - 1 - i : i; };
  const bool copies = Shape::kLoaders == 0 || !scan.computes();
  constexpr int kStages = kScanStages<Shape, Stage>, kAhead = kStages - 1;
  static_assert(kStages >= 2, "copies are on their way while a chunk is computed");
  const auto load = [&](int64_t i) {
    if (i < count) scan.load(stages[i % kStages], number(i));
    ptx::cp_async_commit();
  };
  // Waits for a chunk's tiles, and starts the copies of one further on where no loaders do.
  const auto acquire_stage = [&](int64_t i, bool loads) {
    if (loads) ptx::cp_async_wait<kAhead - 1>();
    __syncthreads();  // the stage of the chunk before has been read, too
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
  if (from) scan.for_state(state, [&](float& one, int64_t i) { one = static_cast<const float*>(from)[i]; });
  for (int64_t i = 0; i < count; ++i) {
    acquire_stage(i, Shape::kLoaders == 0);
    scan.advance(stages[i % kStages], number(i), state);
  }
  if (to) scan.for_state(state, [&](float& one, int64_t i) { static_cast<float*>(to)[i] = one; });
}

// Zeros, which stay above the diagonal.
template <typename Shape, typename Stage>
__device__ __forceinline__ void clear_terms(Stage* stages, int count) {
  constexpr int kUnits = sizeof(typename decltype(stages->terms)::Matrices) / 16;
  for (int i = threadIdx.x; i < count * kUnits; i += Shape::kThreads)
    (&stages[i / kUnits].terms.z[0][0])[i % kUnits] = make_uint4(0, 0, 0, 0);
}

// The same on warpgroups: those that compute wait for a stage's copies, the one that copies for stages that nobody
// reads.
template <typename Shape, bool kBackwards, typename Scan, typename Stage>
__device__ __forceinline__ void scan_on_warpgroups(const Scan& scan, Stage* stages, const void* from, void* to) {
  constexpr int kStages = kScanStages<Shape, Stage>;
  static_assert(kStages >= 2, "copies are on their way while a chunk is computed");
  __shared__ uint64_t barriers[2 * kStages];  // that there are some tells the host that there is a kernel
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
    if (from) scan.for_state(state, [&](float& one, int64_t i) { one = static_cast<const float*>(from)[i]; });
    for (int i = 0; i < count; ++i) {
      ring.wait_full(i);
      ptx::fence_proxy_async();  // tiles were written as ordinary stores write
      scan.advance(stages[i % kStages], number(i), state);
      // One lane arrives for its warp, in order behind the reads of all. Racecheck does not follow that, and reports
      // the copies that come next; it reports none where each lane arrives.
      __syncwarp();
      if (scan.lane == 0) ring.release(i);
    }
    if constexpr (Stage::kTailBytes > 0) ptx::bulk_wait<0>();
    if (to) scan.for_state(state, [&](float& one, int64_t i) { static_cast<float*>(to)[i] = one; });
  }
}

// Whether kernels of a shape are compiled for this architecture. For 9.0a: warpgroups, and the blocks of few columns
// that walk where warpgroups would leave processors without work; for all others what is no warpgroup's.
template <typename Shape>
__device__ __forceinline__ constexpr bool is_compiled() {
#if !defined(__CUDA_ARCH__)
  return true;
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  return Shape::kLoaders > 0;
#else
  return !Shape::kHopper;
#endif
}

template <typename Shape, bool kBackwards, typename Scan, typename Stage>
__device__ __forceinline__ void scan_chunks(const Scan& scan, Stage* stages, const void* from, void* to) {
  if constexpr (is_compiled<Shape>()) {
    if constexpr (Shape::kHopper) {
      scan_on_warpgroups<Shape, kBackwards>(scan, stages, from, to);
    } else {
      scan_on_warps<Shape, kBackwards>(scan, stages, from, to);
    }
  }
}

}  // namespace flashinfer::cuda
