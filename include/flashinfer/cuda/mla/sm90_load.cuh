// Producer of blocks of keys: one warp that issues TMA loads, or a warpgroup that gathers rows.
#pragma once

#include <cuda.h>

#include <cstdint>

#include <flashinfer/cuda/mla/sm90_shape.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/tma.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>

namespace flashinfer::cuda::sm90 {

// Tensor maps of the caches, with dimensions element, token of the page, page. A box has 64 elements of
// `rows` tokens.
struct MlaMaps {
  CUtensorMap ckv, kpe;
  int32_t rows;
};

// Load one side of a block by TMA, in one warp. Lane i starts box i.
__device__ __forceinline__ void mla_load_side(const MlaParams& params, const MlaMaps& maps, const MlaShared& shared,
                                              const WorkItem& item, int32_t first_page, int block, int side) {
  const int lane = static_cast<int>(threadIdx.x) % 32, buffer = block % 2;
  const int chunks = side ? kMlaChunks - kMlaSideChunks : kMlaSideChunks, parts = kMlaKeys / maps.rows;
  const int chunk = lane / parts + side * kMlaSideChunks, part = lane % parts;
  const int32_t key = item.kv_start + block * kMlaKeys + part * maps.rows;
  // After the end the page is out of bounds, so TMA writes zeros. The look-up precedes the wait to hide its
  // latency.
  uint32_t number, row;
  params.kv.page_size.divmod(static_cast<uint32_t>(key), number, row);
  const int32_t page = key < item.kv_end ? params.kv.indices[first_page + static_cast<int32_t>(number)]
                                         : static_cast<int32_t>(params.kv.num_pages);
  ptx::mbarrier_wait(shared.empty(buffer, side), (static_cast<uint32_t>(block / 2) & 1) ^ 1);
  if (lane < chunks)
    ptx::mbarrier_arrive_expect_tx(shared.full(buffer, side * kMlaSideChunks + lane), MlaShared::kChunk);
  __syncwarp();
  if (lane < chunks * parts) {
    const uint32_t to = shared.keys(buffer) + chunk * MlaShared::kChunk + part * maps.rows * 128;
    const bool latent = chunk < kMlaChunks - 1;
    ptx::tma_load(to, latent ? &maps.ckv : &maps.kpe, shared.full(buffer, chunk), latent ? chunk * 64 : 0,
                  static_cast<int>(row), page);
  }
  __syncwarp();
}

// Load all sides of all blocks, in the order in which the consumers release them.
template <typename Load>
__device__ __forceinline__ void mla_load_all(int pairs, const Load& load) {
  load(kBlockA, kMlaLeftSide);
  load(kBlockA, kMlaRightSide);
  load(kBlockB, kMlaRightSide);
  load(kBlockB, kMlaLeftSide);
#pragma unroll 1
  for (int pair = 1; pair < pairs; ++pair) {
    load(2 * pair, kMlaLeftSide);
    load(2 * pair + 1, kMlaRightSide);
    load(2 * pair, kMlaRightSide);
    load(2 * pair + 1, kMlaLeftSide);
  }
}

// Gather the rows of a pair of blocks in a warpgroup, with eight lanes per row of a chunk. A thread looks up
// the page of one row, one pair ahead.
template <typename T>
struct MlaGatherer {
  static constexpr int kRowsPerThread = kMlaKeys / 16;
  const MlaParams& params;
  const MlaShared& shared;
  const WorkItem& item;
  const int32_t first_page;
  const int thread = static_cast<int>(threadIdx.x) % 128, unit = thread % 8, row0 = thread / 8;

  __device__ __forceinline__ int32_t page_of(int pair) const {
    const int32_t key = item.kv_start + pair * 2 * kMlaKeys + thread;
    return key < item.kv_end ? params.kv.indices[first_page + static_cast<int32_t>(params.kv.page_size.div(key))] : -1;
  }

  // Copy one side of a block. Rows after the item's end become zeros and are not read.
  template <int kSide>
  __device__ __forceinline__ void copy(int block) const {
    const int buffer = block % 2;
    const KvCache& kv = params.kv;
    const T* rows[kRowsPerThread];
    bool exists[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int32_t page = shared.pages()[buffer * kMlaKeys + row0 + 16 * i];
      const int32_t key = item.kv_start + block * kMlaKeys + row0 + 16 * i;
      const auto row = static_cast<int32_t>(key - kv.page_size.div(key) * kv.page_size.divisor);
      exists[i] = page >= 0;
      const int64_t offset = kSide == kMlaRopeSide ? kv.v_offset(page, row) : kv.k_offset(page, row);
      rows[i] = static_cast<const T*>(kSide == kMlaRopeSide ? kv.v : kv.k) + (exists[i] ? offset : 0) + unit * 8;
    }
    ptx::mbarrier_wait(shared.empty(buffer, kSide), (static_cast<uint32_t>(block / 2) & 1) ^ 1);
#pragma unroll 1
    for (int chunk = mla_first_chunk(kSide); chunk < mla_first_chunk(kSide + 1); ++chunk) {
      const uint32_t to = shared.keys(buffer) + chunk * MlaShared::kChunk;
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i)
        ptx::cp_async_16(to + MlaChunk::unit(row0 + 16 * i, unit), rows[i] + (kSide == kMlaRopeSide ? 0 : chunk * 64),
                         exists[i]);
      ptx::mbarrier_arrive_after_cp_async(shared.full(buffer, chunk));
    }
  }

  __device__ __forceinline__ void copy_all(int pairs) const {
    int32_t page = page_of(0);
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair) {
      ptx::named_barrier<128>(kMlaProducer);
      shared.pages()[thread] = page;
      ptx::named_barrier<128>(kMlaProducer);
      page = page_of(pair + 1);
      const int a = 2 * pair, b = a + 1;
      copy<kMlaRopeSide>(a);
      copy<kMlaRopeSide>(b);
      copy<kMlaLeftSide>(a);
      copy<kMlaRightSide>(pair == 0 ? a : b);
      copy<kMlaRightSide>(pair == 0 ? b : a);
      copy<kMlaLeftSide>(b);
    }
    ptx::cp_async_wait<0>();
  }
};

}  // namespace flashinfer::cuda::sm90
