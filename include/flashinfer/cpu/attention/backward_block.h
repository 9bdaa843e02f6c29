// A worker's memory in attention's gradients, and the sizes of its blocks.
#pragma once

#include <type_traits>

#include <flashinfer/cpu/attention/types.h>

namespace flashinfer::cpu {

constexpr int kBackwardRows = 128, kBackwardKeys = 128;  // of a block
constexpr int kBackwardChunk = 512;                      // keys that are packed and accumulated together
constexpr int kWeightStride = kBackwardKeys + kLanes;    // not a power of two, whose rows would share few cache lines

// Memory of a worker, in panels: kPanel numbers of each row, then the next kPanel of each.
struct BackwardScratch {
  int dim_qk, dim_vo;
  Scratch memory;
  float *keys_by_column, *keys, *values_by_column, *dk, *dv;  // of a chunk
  float *q, *grad, *dq, *lse, *delta;                         // of a tile
  float *weights, *ds;                                        // of a block

  BackwardScratch(int qk, int vo)
      : dim_qk(round_up(qk, kPanel)),
        dim_vo(round_up(vo, kPanel)),
        memory(int64_t{kBackwardChunk} * (3 * dim_qk + 2 * dim_vo) +
               int64_t{kBackwardRows} * (2 * dim_qk + dim_vo + 2) + 2 * kBackwardRows * kWeightStride),
        keys_by_column(memory.take(kBackwardChunk * dim_qk)),
        keys(memory.take(kBackwardChunk * dim_qk)),
        values_by_column(memory.take(kBackwardChunk * dim_vo)),
        dk(memory.take(kBackwardChunk * dim_qk)),
        dv(memory.take(kBackwardChunk * dim_vo)),
        q(memory.take(kBackwardRows * dim_qk)),
        grad(memory.take(kBackwardRows * dim_vo)),
        dq(memory.take(kBackwardRows * dim_qk)),
        lse(memory.take(kBackwardRows)),
        delta(memory.take(kBackwardRows)),
        weights(memory.take(kBackwardRows * kWeightStride)),
        ds(memory.take(kBackwardRows * kWeightStride)) {}
};

// Call body(d, constant of vectors) for the panels of a head of `dim` numbers.
template <typename Body>
inline void for_panels(int dim, const Body& body) {
  int d = 0;
  for (; d + kLanes < dim; d += kPanel) body(d, std::integral_constant<int, kPanelVectors>{});
  if (d < dim) body(d, std::integral_constant<int, 1>{});
}

}  // namespace flashinfer::cpu
