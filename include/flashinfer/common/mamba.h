// One step of Mamba's selective state space model (Gu and Dao 2023, arXiv 2312.00752; Mamba-2: Dao and Gu
// 2024, arXiv 2405.21060): parameters that the binding and the kernels of every backend share.
//
// For each sequence, head and row p of its state s[N], per token:
//   d = softplus(dt + dt_bias);  s = exp(d A) s + d x B;  y = s . C + D x;  y = y silu(z)
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/philox.h>
#include <flashinfer/common/rows.h>

namespace flashinfer {

constexpr int64_t kMaxStateSize = 256;  // elements in a row of a state

// A tensor [B, T, heads or groups, n] with a contiguous last dimension. Strides are in elements. Null if
// absent.
struct TokenTensor {
  const void* data;
  int64_t batch_stride, token_stride, head_stride;

  FLASHINFER_HD int64_t at(int64_t b, int64_t t, int64_t h) const {
    return b * batch_stride + t * token_stride + h * head_stride;
  }
};

// Numbers of any floating-point type and any strides. A stride is 0 if the dimension shares one number. Null
// if absent.
struct StridedNumbers {
  const void* data;
  DType dtype;
  int64_t strides[4];
};

// Indices [n, columns], int32 or int64. Null if absent.
struct IndexTable {
  const void* data;
  bool wide;
  int64_t row_stride, columns;

  FLASHINFER_HD int64_t at(int64_t row, int64_t column) const {
    const int64_t i = row * row_stride + (column < columns ? column : columns - 1);
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// Scales of the rows of int16 states. Strides are in elements. Null if the states are floats.
struct StateScales {
  float* data;
  int64_t slot_stride, head_stride, row_stride;

  FLASHINFER_HD float* at(int64_t slot, int64_t head, int64_t row) const {
    return data + slot * slot_stride + head * head_stride + row * row_stride;
  }
};

// Scale of a row of an int16 state, s = scale q with |q| <= 32767, from the largest |s|. A row below 1e-30 is
// stored as zeros, because its scale may have no inverse. A row with a NaN or an infinity gets an infinite
// scale and zeros, whose products are NaN.
struct RowScale {
  float scale, inverse;  // an inverse of 0: all q are 0

  FLASHINFER_HD explicit RowScale(float largest) : scale(1.f), inverse(0.f) {
    if (largest < 1e-30f) return;
    scale = largest / 32767.f;
    if (largest <= FLT_MAX) inverse = 32767.f / largest;
  }
};

// Return the magnitude of an element for the largest of its row. NaN counts as infinity, because a maximum of
// floats ignores it.
FLASHINFER_HD float magnitude_in_row(float s) {
  const float magnitude = s < 0 ? -s : s;
  return magnitude <= FLT_MAX ? magnitude : static_cast<float>(HUGE_VAL);
}

struct StateUpdateParams {
  void* state;         // [num_slots, H, P, N], each slot contiguous
  DType state_dtype;   // float32, float16, bfloat16, or int16 with scales
  StateScales scales;  // [num_slots, H, P]
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
  IndexTable offsets;       // [num_sequences + 1, 1], sequences of a batch of 1; or null
  int64_t num_sequences;    // B, or the length of offsets minus 1
  IndexTable slots;         // slot of a sequence's first state; null: its number
  IndexTable output_slots;  // slot of its last state; null: as slots
  IndexTable
      accepted;  // the first state is in column accepted - 1 of slots, and each token's state goes to its own column
  int64_t pad_slot;  // starts from a state of zeros and writes none; the same for slots outside the pool
  void* history;     // [history_slots, history_steps, H, P, N], contiguous: the state after each token, or null
  StateScales history_scales;  // [history_slots, history_steps, H, P], contiguous: one "slot" is a head
  int64_t history_slots, history_steps;
  IndexTable history_indices;  // null: as slots
  const int64_t* seed;         // for stochastic rounding of 16-bit states, or null
  int rounds;
  DType dtype;  // of x, z, b, c, out

  FLASHINFER_HD int64_t head_size() const { return dim * state_size; }
  FLASHINFER_HD bool is_slot(int64_t slot) const { return slot >= 0 && slot < num_slots && slot != pad_slot; }

  // Return true if all elements of a head's state share a decay, as in Mamba-2.
  bool one_decay() const {
    return dt.strides[3] == 0 && a.strides[1] == 0 && a.strides[2] == 0 && bias.strides[1] == 0;
  }
};

// Tokens and states of a sequence. Offsets are clamped: invalid ones give wrong numbers, but no access out of
// bounds.
struct StateSequence {
  int64_t batch, begin, end, slot, history_slot;

  FLASHINFER_HD StateSequence(const StateUpdateParams& p, int64_t n) : batch(n), begin(0), end(p.num_tokens) {
    if (p.offsets.data) {
      const int64_t first = p.offsets.at(n, 0), last = p.offsets.at(n + 1, 0), limit = p.num_tokens;
      batch = 0;
      begin = first < 0 ? 0 : first > limit ? limit : first;
      end = last < begin ? begin : last > limit ? limit : last;
    }
    const int64_t start = p.accepted.data ? p.accepted.at(n, 0) - 1 : 0;
    slot = p.slots.data ? p.slots.at(n, start < 0 ? 0 : start) : n;
    if (!p.is_slot(slot)) slot = -1;
    history_slot = slot >= 0 && p.history_indices.data ? p.history_indices.at(n, 0) : slot;
  }

  // Return the slot for the state after token `t` of this sequence, or -1.
  FLASHINFER_HD int64_t slot_after(const StateUpdateParams& p, int64_t n, int64_t t) const {
    if (!p.update || slot < 0 || (!p.accepted.data && t + 1 != end)) return -1;
    const IndexTable& table = p.output_slots.data ? p.output_slots : p.slots;
    const int64_t column = p.accepted.data ? t - begin : 0;
    if (column > 0 && column >= table.columns) return -1;
    const int64_t to = table.data ? table.at(n, column) : n;
    return p.is_slot(to) ? to : -1;
  }

  // Return the index of the head's state after token `t` in `history`, or -1.
  FLASHINFER_HD int64_t history_after(const StateUpdateParams& p, int64_t t, int64_t head) const {
    if (!p.history || history_slot < 0 || history_slot >= p.history_slots || t - begin >= p.history_steps) return -1;
    return (history_slot * p.history_steps + t - begin) * p.num_heads + head;
  }
};

// Return four random words for elements [4 i, 4 i + 4) of a pool of states, after token `t`.
FLASHINFER_HD PhiloxBlock rounding_words(uint64_t seed, int64_t i, int64_t t, int rounds) {
  const PhiloxBlock counter{
      {static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32), static_cast<uint32_t>(t), 0x73727475u}};
  return philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), rounds);
}

// Rounds to one of the two neighbours of `value` in a 16-bit type, at random. The expectation is `value`.
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
  // Distance to the next half, a power of two. A float has 13 more fraction bits than a half.
  const uint32_t step_bits = static_cast<uint32_t>(exponent - 10 + 127) << 23;
  const uint32_t inverse_bits = static_cast<uint32_t>(10 - exponent + 127) << 23;
  float step, inverse;
  memcpy(&step, &step_bits, 4), memcpy(&inverse, &inverse_bits, 4);
  const float scaled = (value < 0 ? -value : value) * inverse + static_cast<float>(word >> 19) * 0x1p-13f;
  const float magnitude = static_cast<float>(static_cast<int32_t>(scaled)) * step;
  return value < 0 ? -magnitude : magnitude;
}

struct Launch;
void selective_state_update(const StateUpdateParams& params, const Launch& launch);

}  // namespace flashinfer
