// One step of Mamba's state space model: parameters shared by the binding and by the kernels of every backend.
//
// Of a sequence, a head h and a row p of its state s[N], for each token:
//   d = softplus(dt + dt_bias);  s = exp(d A) s + d x B;  y = s . C + D x;  y = y silu(z)
#pragma once

#include <cstdint>
#include <cstring>

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/philox.h>
#include <flashinfer/common/rows.h>

namespace flashinfer {

constexpr int64_t kMaxStateSize = 256;  // elements of a row of a state

// A tensor [B, T, heads or groups, n] whose last dimension is contiguous; strides in elements. Null where none is
// given.
struct TokenTensor {
  const void* data;
  int64_t batch_stride, token_stride, head_stride;

  FLASHINFER_HD int64_t at(int64_t b, int64_t t, int64_t h) const {
    return b * batch_stride + t * token_stride + h * head_stride;
  }
};

// Numbers of any floating-point type and strides, 0 where a head has one for all. Null where none are given.
struct StridedNumbers {
  const void* data;
  DType dtype;
  int64_t strides[4];
};

// Integers [n, columns] of either width that torch has for indices; null where none are given.
struct IndexTable {
  const void* data;
  bool wide;
  int64_t row_stride, columns;

  FLASHINFER_HD int64_t at(int64_t row, int64_t column) const {
    const int64_t i = row * row_stride + (column < columns ? column : columns - 1);
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct StateUpdateParams {
  void* state;  // [num_slots, H, P, N], contiguous but for slots
  DType state_dtype;
  int64_t num_slots, slot_stride;
  TokenTensor x, z;     // [B, T, H, P]
  TokenTensor b, c;     // [B, T, G, N]
  TokenTensor out;      // [B, T, H, P]
  StridedNumbers dt;    // [B, T, H, P]
  StridedNumbers a;     // [H, P, N]
  StridedNumbers d;     // [H, P]
  StridedNumbers bias;  // [H, P]
  bool softplus, update;
  int64_t batch_size, num_tokens, num_heads, num_groups, dim, state_size;
  IndexTable offsets;       // [num_sequences + 1, 1] of sequences in a batch of 1, else null
  int64_t num_sequences;    // B, or one less than there are offsets
  IndexTable slots;         // of a sequence's first state; null: its own number
  IndexTable output_slots;  // of its last state; null: as slots
  IndexTable accepted;      // column + 1 of slots to start from; each token's state is written to its own column then
  int64_t pad_slot;         // as is every slot that the pool does not have: nothing is read or written, out is 0
  void* history;            // [history_slots, history_steps, H, P, N], contiguous: the state after each token, or null
  int64_t history_slots, history_steps;
  IndexTable history_indices;  // null: as slots
  const int64_t* seed;         // of stochastic rounding of states in 16 bits, or null
  int rounds;
  DType dtype;  // of x, z, b, c, out

  FLASHINFER_HD int64_t head_size() const { return dim * state_size; }
  FLASHINFER_HD bool is_slot(int64_t slot) const { return slot >= 0 && slot < num_slots && slot != pad_slot; }

  // One step for all rows and elements of a head's state: Mamba-2.
  bool one_decay() const {
    return dt.strides[3] == 0 && a.strides[1] == 0 && a.strides[2] == 0 && bias.strides[1] == 0;
  }
};

// Where a sequence's tokens and states are. Offsets are clamped: wrong ones give wrong numbers and no wild access.
struct StateSequence {
  int64_t batch, begin, end, slot, history_slot;

  FLASHINFER_HD StateSequence(const StateUpdateParams& p, int64_t n) : batch(n), begin(0), end(p.num_tokens) {
    if (p.offsets.data) {
      const int64_t first = p.offsets.at(n, 0), last = p.offsets.at(n + 1, 0), most = p.num_tokens;
      batch = 0;
      begin = first < 0 ? 0 : first > most ? most : first;
      end = last < begin ? begin : last > most ? most : last;
    }
    const int64_t start = p.accepted.data ? p.accepted.at(n, 0) - 1 : 0;
    slot = p.slots.data ? p.slots.at(n, start < 0 ? 0 : start) : n;
    if (!p.is_slot(slot)) slot = -1;
    history_slot = p.history_indices.data ? p.history_indices.at(n, 0) : slot;
  }

  // The slot that the state after token `t` of this sequence goes to, or -1.
  FLASHINFER_HD int64_t slot_after(const StateUpdateParams& p, int64_t n, int64_t t) const {
    if (!p.update || slot < 0 || (!p.accepted.data && t + 1 != end)) return -1;
    const IndexTable& table = p.output_slots.data ? p.output_slots : p.slots;
    const int64_t column = p.accepted.data ? t - begin : 0;
    if (column > 0 && column >= table.columns) return -1;
    const int64_t to = table.data ? table.at(n, column) : n;
    return p.is_slot(to) ? to : -1;
  }

  // Number of the head's state after token `t` in `history`, or -1.
  FLASHINFER_HD int64_t history_after(const StateUpdateParams& p, int64_t t, int64_t head) const {
    if (!p.history || history_slot < 0 || history_slot >= p.history_slots || t - begin >= p.history_steps) return -1;
    return (history_slot * p.history_steps + t - begin) * p.num_heads + head;
  }
};

// Four random words for elements [4 i, 4 i + 4) of a pool of states, after token `t`.
FLASHINFER_HD PhiloxBlock rounding_words(uint64_t seed, int64_t i, int64_t t, int rounds) {
  const PhiloxBlock counter{
      {static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32), static_cast<uint32_t>(t), 0x73727475u}};
  return philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), rounds);
}

// One of the two numbers of a type of 16 bits that are next to `value`, as a float; the expectation is `value`.
FLASHINFER_HD float stochastic_bfloat16(float value, uint32_t word) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits >> 23 & 255) == 255) return value;
  bits = (bits + (word >> 16)) & 0xffff0000u;
  memcpy(&value, &bits, 4);
  return value;
}
FLASHINFER_HD float stochastic_half(float value, uint32_t word) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  int exponent = static_cast<int>(bits >> 23 & 255) - 127;
  if (exponent == 128) return value;
  if (exponent < -14) exponent = -14;
  // The distance to the next half, a power of two; 13 bits of the fraction are what a float has beyond a half.
  const uint32_t step_bits = static_cast<uint32_t>(exponent - 10 + 127) << 23;
  const uint32_t inverse_bits = static_cast<uint32_t>(10 - exponent + 127) << 23;
  float step, inverse;
  memcpy(&step, &step_bits, 4), memcpy(&inverse, &inverse_bits, 4);
  const float scaled = (value < 0 ? -value : value) * inverse + static_cast<float>(word >> 19) * 0x1p-13f;
  const float kept = static_cast<float>(static_cast<int32_t>(scaled)) * step;
  return value < 0 ? -kept : kept;
}

struct Launch;
void selective_state_update(const StateUpdateParams& params, const Launch& launch);

}  // namespace flashinfer
