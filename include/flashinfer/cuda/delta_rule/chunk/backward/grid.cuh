// Work order of the gradient kernel. From outermost to innermost, the loops run over items (a chunk and a
// head of q and k), parts of the keys, value heads of the group, and slices of columns.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/chunk.cuh>

namespace flashinfer::cuda {

// Sizes of the loops.
struct GradientGrid {
  int items, slices, group, parts;

  __device__ __forceinline__ GradientGrid(const DeltaRuleInputs& in, int64_t chunks, int64_t slices_, int parts_ = 1)
      : items(static_cast<int>(chunks * in.num_heads)),
        slices(static_cast<int>(slices_)),
        group(static_cast<int>(in.group())),
        parts(parts_) {}
};
// A position in the loops. `member` is the value head's index in its group.
struct GradientCursor {
  int item, part, member, slice;
  int parts_done, heads_done;  // key parts and value heads that this CTA has finished: indices of rings
  int chunk_index, qk_head;
  DeltaChunk chunk;

  __device__ __forceinline__ GradientCursor(const DeltaRuleInputs& in, const GradientGrid& grid)
      : item(blockIdx.x),
        part(0),
        member(0),
        slice(0),
        parts_done(0),
        heads_done(0),
        chunk_index(0),
        qk_head(0),
        chunk({0, 0, 0}, -1) {
    find(in, grid);
  }
  __device__ __forceinline__ bool done(const GradientGrid& grid) const { return item >= grid.items; }
  __device__ __forceinline__ int64_t value_head(const GradientGrid& grid) const {
    return qk_head * grid.group + member;
  }
  // Index of the chunk and value head among all.
  __device__ __forceinline__ int64_t index(const DeltaRuleInputs& in, const GradientGrid& grid) const {
    return chunk_index * in.num_value_heads + value_head(grid);
  }
  __device__ __forceinline__ bool last_slice(const GradientGrid& grid) const { return slice + 1 == grid.slices; }
  __device__ __forceinline__ bool last_member(const GradientGrid& grid) const { return member + 1 == grid.group; }
  __device__ __forceinline__ bool last_part(const GradientGrid& grid) const { return part + 1 == grid.parts; }
  __device__ __forceinline__ void advance(const DeltaRuleInputs& in, const GradientGrid& grid) {
    if (!last_slice(grid)) {
      ++slice;
      return;
    }
    slice = 0, ++heads_done;
    if (!last_member(grid)) {
      ++member;
      return;
    }
    member = 0, ++parts_done;
    if (++part < grid.parts) return;
    part = 0, item += gridDim.x;
    find(in, grid);
  }

 private:
  __device__ __forceinline__ void find(const DeltaRuleInputs& in, const GradientGrid& grid) {
    for (; !done(grid); item += gridDim.x) {
      chunk_index = item / static_cast<int>(in.num_heads), qk_head = item % static_cast<int>(in.num_heads);
      chunk = find_chunk(in, chunk_index);
      if (chunk.count > 0) return;
    }
  }
};

}  // namespace flashinfer::cuda
