// All-to-all of experts over the memory that the ranks of a group share: dispatch sends each token to the
// ranks of its experts, combine returns their results and adds them.
//
// Rank r has the experts [r E / n, (r + 1) E / n) of E. Dispatch writes row t of each payload to row (rank,
// t) of the payload's area in the inbox of every rank that has an expert of token t, once. The place of a row
// follows from its sender and token, so no rank counts rows, and results do not depend on the order of
// arrival. Combine writes row (s, t) of each rank's results to row (rank, t) of rank s, and rank s adds the
// rows of token t in float32 in the order in which the token's experts name their ranks.
//
// Payloads may have any bits, so their words cannot be their own flags as in common/allreduce.h. The header
// is the flag: a rank sends it after its rows, and the other side acquires it. Both functions end when the
// headers of all ranks have arrived. This makes one copy of each area enough. A rank writes rows of the next
// dispatch after combine, whose headers follow the peers' reads of the last dispatch. It writes results of
// the next combine after that dispatch, whose headers follow the peers' sums of the last combine. Areas of
// dispatch and combine are disjoint for this reason, and calls alternate.
//
// An inbox has the headers, then flags int32 [ranks, most] of the rows that were sent, then the payloads'
// areas [ranks, most, row_bytes], each at a multiple of kAreaBytes. The area of results is the last of the
// inbox.
#pragma once

#include <flashinfer/common/allreduce.h>

namespace flashinfer {

constexpr int kMaxPayloads = 6;
constexpr int64_t kAreaBytes = 128;

struct MoePayload {
  const void* rows;
  int64_t row_bytes, offset;  // of its area, after the headers
};

struct MoeDispatchParams {
  AllReduceParams call;    // group and header: `rows` is the most tokens of a rank, equal on all ranks
  const int32_t* experts;  // [tokens, top_k], others than [0, num_experts) have no rank
  int32_t* targets;        // [tokens, top_k]: the expert's rank at its first occurrence, else -1
  int64_t tokens;
  int top_k, num_experts;
  MoePayload payloads[kMaxPayloads];
  int count;
  int ids;             // payload of int32 that is invalid_id in rows that were not sent, or -1
  int32_t invalid_id;  // written by the sender, also after its last token
};

struct MoeCombineParams {
  AllReduceParams call;    // `input` [ranks, rows, hidden], `out` [tokens, hidden]
  const int32_t* targets;  // of dispatch
  int64_t tokens;
  int top_k;
  int64_t offset;  // of the area of results, after the headers
};

// Return bits for the header that differ if ranks divide a token's bytes into other payloads, or mark other
// ids. The upper half of `kind` has 16 bits: the number of payloads, that of the ids, and a hash of the sizes.
inline uint32_t layout_bits(const MoeDispatchParams& p) {
  uint32_t hash = 0;
  for (int i = 0; i < p.count; ++i) hash = (hash ^ static_cast<uint32_t>(p.payloads[i].row_bytes)) * 0x9e3779b1u;
  return static_cast<uint32_t>(p.count) << 29 | static_cast<uint32_t>(p.ids + 1) << 26 | hash >> 22 << 16;
}

FLASHINFER_HD int64_t whole_areas(int64_t bytes) { return (bytes + kAreaBytes - 1) / kAreaBytes * kAreaBytes; }

FLASHINFER_HD uint8_t* region_of(const CommGroup& group, int rank) { return group.inbox[rank] + kHeaderBytes; }

// Return the rank of entry k of a token's experts if no entry before it has the same rank, else -1. `seen`
// has the ranks of the entries before it as bits.
FLASHINFER_HD int next_target(const MoeDispatchParams& p, int64_t token, int k, uint32_t& seen) {
  const int32_t expert = p.experts[token * p.top_k + k];
  if (expert < 0 || expert >= p.num_experts) return -1;
  const int target = expert / (p.num_experts / p.call.group.ranks);
  if (seen >> target & 1) return -1;
  seen |= 1u << target;
  return target;
}

// Return the widest access in bytes, at most 16, that divides all of `bits`.
FLASHINFER_HD int access_bytes(uint64_t bits) {
  int bytes = 16;
  while (bits % bytes != 0) bytes /= 2;
  return bytes;
}

void moe_dispatch(const MoeDispatchParams& params, const Launch& launch);
void moe_combine(const MoeCombineParams& params, const Launch& launch);

}  // namespace flashinfer
