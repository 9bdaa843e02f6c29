// Clusters of CTAs that share their shared memory (sm_90). On other GPUs a CTA is its own cluster.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashinfer::cuda::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

__device__ __forceinline__ uint32_t cluster_size() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#else
  return 1;
#endif
}

// Synchronise all threads of the cluster and make their earlier writes visible, also those to shared
// memory.
__device__ __forceinline__ void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// cluster_sync() in two steps, with work between them that needs no other CTA.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Synchronise reads: all are complete before any thread continues. The arrival is relaxed and does not order
// a load whose value is unused: each thread must consume what it has read before it arrives. It does not wait
// for writes, which takes longer: another CTA was seen to read bins of atomics before they were complete.
__device__ __forceinline__ void cluster_sync_reads() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Return the bytes of dynamic shared memory of this launch.
__device__ __forceinline__ int dynamic_shared_bytes() {
  int bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

// Return the address of an object of this CTA in the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t of_rank(const void* object, uint32_t rank) {
  const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(object));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(local), "r"(rank));
  return mapped;
#else
  return local;
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FLASHINFER_CLUSTER_SPACE "shared::cluster"
#else
#define FLASHINFER_CLUSTER_SPACE "shared"
#endif

// Store a value, and count its four bytes at a barrier in the same CTA's shared memory.
__device__ __forceinline__ void store_of_rank(uint32_t at, uint32_t value, uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(at), "r"(value),
               "r"(barrier)
               : "memory");
#else
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
#endif
}

__device__ __forceinline__ uint32_t load_of_rank(uint32_t at) {
  uint32_t value;
  asm volatile("ld." FLASHINFER_CLUSTER_SPACE ".u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
  return value;
}

__device__ __forceinline__ uint4 load4_of_rank(uint32_t at) {
  uint4 value;
  asm volatile("ld." FLASHINFER_CLUSTER_SPACE ".v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(at)
               : "memory");
  return value;
}

// Store a word whose value tells its reader that it has arrived. It orders nothing else.
__device__ __forceinline__ void store_word_of_rank(uint32_t at, uint64_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.relaxed.cluster.shared::cluster.u64 [%0], %1;" ::"r"(at), "l"(word) : "memory");
#else
  asm volatile("st.volatile.shared.u64 [%0], %1;" ::"r"(at), "l"(word) : "memory");
#endif
}
// Load a word of this CTA that another one may store.
__device__ __forceinline__ uint64_t load_word(const uint64_t* from) {
  uint64_t word;
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(from));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("ld.relaxed.cluster.shared::cta.u64 %0, [%1];" : "=l"(word) : "r"(at) : "memory");
#else
  asm volatile("ld.volatile.shared.u64 %0, [%1];" : "=l"(word) : "r"(at) : "memory");
#endif
  return word;
}

#undef FLASHINFER_CLUSTER_SPACE

}  // namespace flashinfer::cuda::ptx
