// Where a block that makes gradients is: it goes from a chunk and a head of q and k to others, at these from part to
// part of the keys, from value head to value head, and at those from slice of columns to slice of columns.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/chunk.cuh>

namespace flashinfer::cuda {

// How many of each there are.
struct DeltaGradientWay {
  int items, slices, group, parts;

  __device__ __forceinline__ DeltaGradientWay(const DeltaRuleInputs& in, int64_t chunks, int64_t slices_,
                                              int parts_ = 1)
      : items(static_cast<int>(chunks * in.num_heads)),
        slices(static_cast<int>(slices_)),
        group(static_cast<int>(in.group())),
        parts(parts_) {}
};
struct DeltaGradientPlace {
  int item, part, member, slice;
  int chunks, heads;  // that the block has done, parts of chunks and of value heads
  int number, head;   // of the chunk and of the head of q and k
  DeltaChunk chunk;

  __device__ __forceinline__ DeltaGradientPlace(const DeltaRuleInputs& in, const DeltaGradientWay& way)
      : item(blockIdx.x), part(0), member(0), slice(0), chunks(0), heads(0), number(0), head(0), chunk({0, 0, 0}, -1) {
    find(in, way);
  }
  __device__ __forceinline__ bool done(const DeltaGradientWay& way) const { return item >= way.items; }
  __device__ __forceinline__ int64_t value_head(const DeltaGradientWay& way) const { return head * way.group + member; }
  // Of the chunk and value head among all.
  __device__ __forceinline__ int64_t place(const DeltaRuleInputs& in, const DeltaGradientWay& way) const {
    return number * in.num_value_heads + value_head(way);
  }
  __device__ __forceinline__ bool last_slice(const DeltaGradientWay& way) const { return slice + 1 == way.slices; }
  __device__ __forceinline__ bool last_member(const DeltaGradientWay& way) const { return member + 1 == way.group; }
  __device__ __forceinline__ bool last_part(const DeltaGradientWay& way) const { return part + 1 == way.parts; }
  __device__ __forceinline__ void advance(const DeltaRuleInputs& in, const DeltaGradientWay& way) {
    if (!last_slice(way)) {
      ++slice;
      return;
    }
    slice = 0, ++heads;
    if (!last_member(way)) {
      ++member;
      return;
    }
    member = 0, ++chunks;
    if (++part < way.parts) return;
    part = 0, item += gridDim.x;
    find(in, way);
  }

 private:
  __device__ __forceinline__ void find(const DeltaRuleInputs& in, const DeltaGradientWay& way) {
    for (; !done(way); item += gridDim.x) {
      number = item / static_cast<int>(in.num_heads), head = item % static_cast<int>(in.num_heads);
      chunk = find_chunk(in, number);
      if (chunk.count > 0) return;
    }
  }
};

}  // namespace flashinfer::cuda
