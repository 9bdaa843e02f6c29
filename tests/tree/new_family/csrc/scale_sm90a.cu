// Kernel of the scale family for Hopper: the copy engine moves tiles between gmem and smem, and threads only
// multiply.
#include <flashinfer/cuda/ptx/mbarrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/ptx/tma.cuh>
#include <flashinfer/cuda/scale.cuh>

#include "scale_config.h"

namespace flashinfer::cuda {

constexpr int kTileBytes = 4096, kTileThreads = 128;

// A CTA scales one tile. The last tile may be shorter, and ordinary accesses serve its last bytes below 16.
template <typename T, int kPower>
__global__ void __launch_bounds__(kTileThreads) scale_tiles(ScaleParams p) {
  constexpr int kTile = kTileBytes / sizeof(T), kPiece = 16 / sizeof(T);
  __shared__ alignas(128) T tile[kTile];
  __shared__ alignas(8) uint64_t arrived;
  const int64_t first = int64_t{blockIdx.x} * kTile;
  const int count = static_cast<int>(min(int64_t{kTile}, p.count - first));
  const int bulk = count / kPiece * kPiece;
  const uint32_t barrier = ptx::shared_address(&arrived), smem = ptx::shared_address(tile);
  const T* in = static_cast<const T*>(p.input) + first;
  T* out = static_cast<T*>(p.output) + first;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_fence_init();
  }
  __syncthreads();
  wait_for_inputs();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier, bulk * sizeof(T));
    if (bulk > 0) ptx::bulk_load(smem, in, bulk * sizeof(T), barrier);
  }
  for (int i = bulk + threadIdx.x; i < count; i += kTileThreads) out[i] = scaled<T, kPower>(in[i], p.factor);
  ptx::mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < bulk; i += kTileThreads) tile[i] = scaled<T, kPower>(tile[i], p.factor);
  // The fence makes the threads' writes visible to the copy engine, which reads by the async proxy.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0 && bulk > 0) {
    ptx::bulk_store(out, smem, bulk * sizeof(T));
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
  launch_dependents();
}

template <typename T, int kPower>
void scale_by_tiles(const ScaleParams& p, const Launch& where) {
  constexpr int64_t kTile = kTileBytes / sizeof(T);
  launch(scale_tiles<T, kPower>, dim3(static_cast<unsigned>((p.count + kTile - 1) / kTile)), dim3(kTileThreads), where,
         p);
}

}  // namespace flashinfer::cuda

namespace flashinfer {

void scale(const ScaleParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, DISPATCH_power(params.power, POWER, cuda::scale_by_tiles<T, POWER>(params, where)))
}

}  // namespace flashinfer
