// What fills the blocks of keys: a warp that starts boxes of the copy engine, or a warpgroup that gathers rows.
#pragma once

#include <cuda.h>

#include <cstdint>

#include <flashinfer/cuda/mla/sm90_shape.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/tma.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>

namespace flashinfer::cuda::sm90 {

// Maps of the caches: elements, tokens of a page, pages. A box has 64 elements of `rows` tokens.
struct MlaMaps {
  CUtensorMap ckv, kpe;
  int32_t rows;
};

// One side of a block by the copy engine, by a warp; lane i starts box i.
__device__ __forceinline__ void mla_load_side(const MlaParams& params, const MlaMaps& maps, const MlaShared& shared,
                                              const WorkItem& item, int32_t first_page, int block, int side) {
  const int lane = static_cast<int>(threadIdx.x) % 32, buffer = block % 2;
  const int chunks = side ? kMlaChunks - kMlaLeft : kMlaLeft, parts = kMlaKeys / maps.rows;
  const int chunk = lane / parts + side * kMlaLeft, part = lane % parts;
  const int32_t key = item.kv_start + block * kMlaKeys + part * maps.rows;
  // Behind the end: a page that there is not, of zeros. The page is looked up before the wait.
  uint32_t number, row;
  params.kv.page_size.divmod(static_cast<uint32_t>(key), number, row);
  const int32_t page = key < item.kv_end ? params.kv.indices[first_page + static_cast<int32_t>(number)]
                                         : static_cast<int32_t>(params.kv.num_pages);
  ptx::mbarrier_wait(shared.empty(buffer, side), (static_cast<uint32_t>(block / 2) & 1) ^ 1);
  if (lane < chunks) ptx::mbarrier_arrive_expect_tx(shared.full(buffer, side * kMlaLeft + lane), MlaShared::kChunk);
  __syncwarp();
  if (lane < chunks * parts) {
    const uint32_t to = shared.keys(buffer) + chunk * MlaShared::kChunk + part * maps.rows * 128;
    const bool latent = chunk < kMlaChunks - 1;
    ptx::tma_load(to, latent ? &maps.ckv : &maps.kpe, shared.full(buffer, chunk), latent ? chunk * 64 : 0,
                  static_cast<int>(row), page);
  }
  __syncwarp();
}

// One side of a block, row by row, by a warpgroup: eight lanes for a row of a chunk.
template <typename T>
__device__ __forceinline__ void mla_gather_side(const MlaParams& params, const MlaShared& shared, const WorkItem& item,
                                                int32_t first_page, int block, int side) {
  const int thread = static_cast<int>(threadIdx.x) % 128, buffer = block % 2;
  const int unit = thread % 8, row0 = thread / 8;
  const int first = side ? kMlaLeft : 0, last = side ? kMlaChunks : kMlaLeft;
  int64_t ckv[kMlaKeys / 16], kpe[kMlaKeys / 16];
  bool there[kMlaKeys / 16];
#pragma unroll
  for (int i = 0; i < kMlaKeys / 16; ++i) {
    const int32_t key = item.kv_start + block * kMlaKeys + row0 + 16 * i;
    there[i] = key < item.kv_end;
    int64_t page = 0, row = 0;
    if (there[i]) params.kv.locate(first_page, key, page, row);
    ckv[i] = params.kv.k_offset(page, row), kpe[i] = params.kv.v_offset(page, row);
  }
  ptx::mbarrier_wait(shared.empty(buffer, side), (static_cast<uint32_t>(block / 2) & 1) ^ 1);
#pragma unroll 1
  for (int chunk = first; chunk < last; ++chunk) {
    const bool latent = chunk < kMlaChunks - 1;
    const T* base = static_cast<const T*>(latent ? params.kv.k : params.kv.v) + (latent ? chunk * 64 : 0) + unit * 8;
    const uint32_t to = shared.keys(buffer) + chunk * MlaShared::kChunk;
#pragma unroll
    for (int i = 0; i < kMlaKeys / 16; ++i)
      ptx::cp_async_16(to + MlaChunk::unit(row0 + 16 * i, unit), base + (latent ? ckv[i] : kpe[i]), there[i]);
    ptx::mbarrier_arrive_after_cp_async(shared.full(buffer, chunk));
  }
}

// All sides of all blocks in the order in which they become free.
template <typename Load>
__device__ __forceinline__ void mla_load_all(int pairs, const Load& load) {
  load(0, 0);
  load(0, 1);
  load(1, 1);
  load(1, 0);
#pragma unroll 1
  for (int pair = 1; pair < pairs; ++pair) {
    load(2 * pair, 0);
    load(2 * pair + 1, 1);
    load(2 * pair, 1);
    load(2 * pair + 1, 0);
  }
}

}  // namespace flashinfer::cuda::sm90
