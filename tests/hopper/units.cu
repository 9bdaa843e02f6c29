// Kernels that use one piece of the Hopper vocabulary each; test_units.py compares what they compute.
#include <flashinfer/cuda/host/tensor_map.h>
#include <flashinfer/cuda/ptx/stmatrix.cuh>
#include <flashinfer/cuda/ptx/timer.cuh>
#include <flashinfer/cuda/ptx/tma.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>
#include <flashinfer/cuda/ptx/wgmma.cuh>
#include <flashinfer/cuda/tile/descriptor.cuh>
#include <flashinfer/cuda/tile/ring.cuh>

#include <cstdio>
#include <map>
#include <string>

namespace {

using namespace flashinfer::cuda;
using ptx::WgmmaType;

constexpr int kKBytes = 256, kSteps = kKBytes / 32;

__device__ uint32_t aligned_start(uint8_t* raw) {
  return (static_cast<uint32_t>(__cvta_generic_to_shared(raw)) + 1023) & ~1023u;
}

// d [64, kN] = a [64, k] * b, which is [kN, k], or [k, kN] with kTransB; k has 256 bytes.
template <WgmmaType kType, int kWidth, int kN, bool kTransB, bool kRegisters>
__global__ void __launch_bounds__(128, 1)
    product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const uint32_t* a_words,
            float* out) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kElements = kType == WgmmaType::kE4M3 ? kWidth : kWidth / 2;
  constexpr int kRowsB = kTransB ? kKBytes / 2 : kN, kRowBytesB = kTransB ? 2 * kN : kKBytes;
  using A = ChunkedTile<64, kWidth>;
  using B = ChunkedTile<kRowsB, kWidth>;
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t barriers[2];
  const uint32_t a_at = aligned_start(raw), b_at = a_at + 64 * kKBytes;
  const Ring<1> ring{static_cast<uint32_t>(__cvta_generic_to_shared(barriers))};
  if (threadIdx.x == 0) {
    ring.init(1, 1);
    ptx::mbarrier_fence_init();
  }
  __syncthreads();
  if (threadIdx.x / 32 == 0 && ptx::elect_one()) {
    ptx::mbarrier_arrive_expect_tx(ring.full(0), 64 * kKBytes + kRowsB * kRowBytesB);
    for (int i = 0; i < kKBytes / kWidth; ++i)
      ptx::tma_load(a_at + i * A::kChunkBytes, &a, ring.full(0), i * kElements, 0, 0);
    for (int i = 0; i < kRowBytesB / kWidth; ++i)
      ptx::tma_load(b_at + i * B::kChunkBytes, &b, ring.full(0), i * kElements, 0, 0);
  }
  ring.wait_full(0);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  float d[kN / 2];
  uint32_t words[kSteps][4];
  if constexpr (kRegisters) {
    for (int i = 0; i < kSteps; ++i)
      for (int j = 0; j < 4; ++j)
        words[i][j] = a_words[(row + j % 2 * 8) * (kKBytes / 4) + i * 8 + lane % 4 + j / 2 * 4];
  }
  ptx::warpgroup_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const uint64_t from_b =
        kTransB ? B::n_contiguous(b_at) + B::n_contiguous_step(i) : B::k_contiguous(b_at) + B::k_contiguous_step(i);
    if constexpr (kRegisters) {
      ptx::Wgmma<kN>::template rs<kType, kTransB>(d, words[i][0], words[i][1], words[i][2], words[i][3], from_b, i > 0);
    } else {
      ptx::Wgmma<kN>::template ss<kType, kTransB>(d, A::k_contiguous(a_at) + A::k_contiguous_step(i), from_b, i > 0);
    }
  }
  ptx::warpgroup_commit();
  ptx::warpgroup_wait<0>();
  ptx::warpgroup_hold(d);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) out[(row + 8 * (i / 2 % 2)) * kN + i / 4 * 8 + 2 * (lane % 4) + i % 2] = d[i];
#endif
}

template <WgmmaType kType, int kWidth, int kN, bool kTransB, bool kRegisters>
void launch_product(const void* a, const void* b, float* out) {
  constexpr bool kWide = kType != WgmmaType::kE4M3;
  constexpr int kSize = kWide ? 2 : 1, kK = kKBytes / kSize, kElements = kWidth / kSize;
  constexpr int kInner = kTransB ? kN : kK, kOuter = kTransB ? kK : kN;
  const auto type = kType == WgmmaType::kBF16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                    : kType == WgmmaType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const CUtensorMap map_a = tensor_map<kWidth, 3>(type, kSize, {a, {kK, 64, 1}, {1, kK, 64 * kK}, {kElements, 64, 1}});
  const CUtensorMap map_b = tensor_map<kWidth, 3>(
      type, kSize, {b, {kInner, kOuter, 1}, {1, kInner, kInner * kOuter}, {kElements, kOuter, 1}});
  constexpr int kBytes = (64 + (kTransB ? kN : kOuter)) * kKBytes + 1024;
  const auto kernel = product<kType, kWidth, kN, kTransB, kRegisters>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  kernel<<<1, 128, kBytes>>>(map_a, map_b, static_cast<const uint32_t*>(a), out);
}

// A box of 64 elements and 32 rows from row `from` on: read by ChunkedTile::unit() into `seen`, and by one
// store, to row `to` of `stored`.
__global__ void __launch_bounds__(32, 1)
    box(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap stored, uint4* seen, int from,
        int to) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t barriers[2];
  const uint32_t at = aligned_start(raw), offset = at - static_cast<uint32_t>(__cvta_generic_to_shared(raw));
  const Ring<1> ring{static_cast<uint32_t>(__cvta_generic_to_shared(barriers))};
  if (threadIdx.x == 0) {
    ring.init(1, 1);
    ptx::mbarrier_fence_init();
    ptx::mbarrier_arrive_expect_tx(ring.full(0), 32 * 128);
    ptx::tma_load(at, &map, ring.full(0), 0, from, 0);
  }
  __syncwarp();
  ring.wait_full(0);
  for (int i = threadIdx.x; i < 32 * 8; i += 32)
    seen[i] = *reinterpret_cast<const uint4*>(raw + offset + ChunkedTile<32>::unit(i / 8, i % 8));
  if (threadIdx.x == 0) {
    ptx::tma_store(&stored, at, 0, to, 0);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
#endif
}

// Numbers 0 ... count - 1 through a ring from one warp to two; each of these adds up what it reads.
__global__ void __launch_bounds__(96, 1) pass_through(int* sums, int count) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kStages = 3;
  __shared__ uint64_t barriers[2 * kStages];
  __shared__ int numbers[kStages][32];
  const Ring<kStages> ring{static_cast<uint32_t>(__cvta_generic_to_shared(barriers))};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ring.init(32, 64);
    ptx::mbarrier_fence_init();
  }
  __syncthreads();
  int sum = 0;
  for (int use = 0; use < count; ++use) {
    if (warp == 0) {
      ring.wait_empty(use);
      numbers[ring.stage(use)][lane] = use;
      ring.arrive_full(use);
    } else {
      ring.wait_full(use);
      sum += numbers[ring.stage(use)][31 - lane];
      ring.release(use);
    }
  }
  if (warp > 0) sums[threadIdx.x - 32] = sum;
#endif
}

// A matrix [16, 16] of 16-bit numbers from fragments to shared memory and out, as it is and transposed.
__global__ void __launch_bounds__(32, 1) store_matrix(const uint32_t* words, uint32_t* plain, uint32_t* transposed) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ alignas(128) uint32_t matrix[2][16 * 8];
  const int lane = threadIdx.x;
  uint32_t r[4];
  for (int j = 0; j < 4; ++j) r[j] = words[(lane / 4 + j % 2 * 8) * 8 + lane % 4 + j / 2 * 4];
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(matrix));
  ptx::stmatrix_x4(at + lane % 16 * 32 + lane / 16 * 16, r[0], r[1], r[2], r[3]);
  ptx::stmatrix_x4_trans(at + 512 + (lane % 8 + lane / 16 * 8) * 32 + lane / 8 % 2 * 16, r[0], r[1], r[2], r[3]);
  __syncwarp();
  for (int i = lane; i < 128; i += 32) plain[i] = matrix[0][i], transposed[i] = matrix[1][i];
#endif
}

std::string last_error;

template <typename F>
int guarded(F work) {
  try {
    work();
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) last_error = cudaGetErrorString(error);
  return error != cudaSuccess;
}

using Product = void (*)(const void*, const void*, float*);
const std::map<std::string, Product>& products() {
  static const std::map<std::string, Product> all{
      {"bf16 128 64 k ss", launch_product<WgmmaType::kBF16, 128, 64, false, false>},
      {"bf16 128 80 k ss", launch_product<WgmmaType::kBF16, 128, 80, false, false>},
      {"f16 128 128 k ss", launch_product<WgmmaType::kF16, 128, 128, false, false>},
      {"bf16 64 48 k ss", launch_product<WgmmaType::kBF16, 64, 48, false, false>},
      {"f16 32 16 k rs", launch_product<WgmmaType::kF16, 32, 16, false, true>},
      {"bf16 128 256 n ss", launch_product<WgmmaType::kBF16, 128, 256, true, false>},
      {"bf16 128 192 n rs", launch_product<WgmmaType::kBF16, 128, 192, true, true>},
      {"f16 64 96 n ss", launch_product<WgmmaType::kF16, 64, 96, true, false>},
      {"bf16 32 32 n rs", launch_product<WgmmaType::kBF16, 32, 32, true, true>},
      {"bf16 128 160 k rs", launch_product<WgmmaType::kBF16, 128, 160, false, true>},
      {"e4m3 128 128 k ss", launch_product<WgmmaType::kE4M3, 128, 128, false, false>},
  };
  return all;
}

}  // namespace

extern "C" {
const char* units_error() { return last_error.c_str(); }
int units_product(const char* name, const void* a, const void* b, float* out) {
  return guarded([&] { products().at(name)(a, b, out); });
}
int units_box(const void* x, int rows, void* seen, void* stored, int from, int to) {
  return guarded([&] {
    const auto map = [&](const void* data) {
      return tensor_map<128, 3>(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                                {data, {64, static_cast<uint64_t>(rows), 1}, {1, 64, 64 * rows}, {64, 32, 1}});
    };
    box<<<1, 32, 32 * 128 + 1024>>>(map(x), map(stored), static_cast<uint4*>(seen), from, to);
  });
}
int units_pass_through(int* sums, int count) {
  return guarded([&] { pass_through<<<1, 96>>>(sums, count); });
}
int units_store_matrix(const void* words, void* plain, void* transposed) {
  return guarded([&] {
    store_matrix<<<1, 32>>>(static_cast<const uint32_t*>(words), static_cast<uint32_t*>(plain),
                            static_cast<uint32_t*>(transposed));
  });
}
int units_map_of_odd_stride(const void* x) {
  return guarded([&] { tensor_map<128, 2>(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, {x, {64, 4}, {1, 65}, {64, 4}}); });
}
}
