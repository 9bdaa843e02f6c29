// Writes to paged caches on the CPU. Every index is checked before the first write.
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>

#include <flashinfer/common/dispatch.h>
#include <flashinfer/common/page.h>
#include <flashinfer/cpu/parallel.h>

namespace flashinfer::cpu {

[[noreturn]] inline void throw_index(const std::string& what, int64_t at, int64_t got, int64_t low, int64_t high) {
  const std::string wanted =
      high < low ? "none: there is no room" : std::to_string(low) + " to " + std::to_string(high);
  throw_value_error(what + "[" + std::to_string(at) + "]: got " + std::to_string(got) + ", wanted " + wanted);
}

// Report why find_slot found no slot.
[[noreturn]] inline void throw_no_slot(const PageTable& p, int64_t token) {
  const std::string op = std::string(p.op) + ": ";
  const int64_t request = p.batch_indices[token], position = p.positions[token];
  if (request < 0 || request >= p.batch_size) throw_index(op + "batch_indices", token, request, 0, p.batch_size - 1);
  const int64_t first = p.kv_indptr[request], last = p.kv_indptr[request + 1];
  const int64_t capacity = (last - first) * p.page_size, at = first + position / p.page_size;
  if (position < 0 || position >= capacity) throw_index(op + "positions", token, position, 0, capacity - 1);
  if (at < 0 || at >= p.num_indices)
    throw_index(op + "kv_indptr", request, first, 0, p.num_indices - position / p.page_size - 1);
  throw_index(op + "kv_indices", at, p.kv_indices[at], 0, p.num_pages - 1);
}

// Return true for a token of no request, as get_batch_indices_positions marks it.
inline bool has_no_request(const PageTable& p, int64_t token) {
  return p.batch_indices[token] == -1 && p.positions[token] == -1;
}

inline void check_slots(const PageTable& p) {
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    if (find_slot(p, token).page < 0 && !has_no_request(p, token)) throw_no_slot(p, token);
  }
}

inline void append_paged(const AppendParams& p) {
  check_slots(p);
  int64_t bytes = 0;
  for (const PagedStream& stream : p.streams) bytes += 2 * stream.num_heads * stream.row_bytes;
  parallel_rows(p.num_tokens, bytes, [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
      const Slot slot = find_slot(p, token);
      if (slot.page < 0) continue;
      for (const PagedStream& stream : p.streams) {
        const char* from = stream.tokens + token * stream.token_stride;
        char* to = stream.cache + slot.page * stream.page_stride + slot.entry * stream.slot_stride;
        for (int64_t head = 0; head < stream.num_heads && stream.row_bytes > 0; ++head) {
          std::memcpy(to + head * stream.head_stride, from + head * stream.token_head_stride, stream.row_bytes);
        }
      }
    }
  });
}

inline void batch_indices_positions(const PositionsParams& p) {
  const std::string op = "get_batch_indices_positions: ";
  if (p.append_indptr[0] < 0 || p.append_indptr[0] > p.num_tokens)
    throw_index(op + "append_indptr", 0, p.append_indptr[0], 0, p.num_tokens);
  for (int64_t i = 0; i < p.batch_size; ++i) {
    const int64_t start = p.append_indptr[i], end = p.append_indptr[i + 1];
    if (end < start || end > p.num_tokens) throw_index(op + "append_indptr", i + 1, end, start, p.num_tokens);
    if (p.seq_lens[i] < end - start) throw_index(op + "seq_lens", i, p.seq_lens[i], end - start, INT32_MAX);
  }
  const int64_t total = p.append_indptr[p.batch_size];
  if (total != p.num_tokens && !p.padded) {
    throw_value_error(op + "nnz: got " + std::to_string(p.num_tokens) + ", wanted append_indptr[-1], " +
                      std::to_string(total));
  }
  std::fill_n(p.batch_indices, p.append_indptr[0], -1);  // tokens before a slice of a table have no request
  std::fill_n(p.positions, p.append_indptr[0], -1);
  std::fill(p.batch_indices + total, p.batch_indices + p.num_tokens, -1);
  std::fill(p.positions + total, p.positions + p.num_tokens, -1);
  for (int64_t i = 0; i < p.batch_size; ++i) {
    const int32_t end = p.append_indptr[i + 1], length = p.seq_lens[i];
    for (int32_t token = p.append_indptr[i]; token < end; ++token) {
      p.batch_indices[token] = static_cast<int32_t>(i), p.positions[token] = length - (end - token);
    }
  }
}

inline void block_offsets(const BlockOffsetsParams& p) {
  const std::string op = "block_sparse_indices_to_vector_sparse_offsets: ";
  for (int64_t b = 0; b < p.batch_size; ++b) {
    const int64_t length = p.kv_lens[b], first = p.block_indptr[b], blocks = (length + p.block_size - 1) / p.block_size;
    if (length < 0 || length > p.num_offsets) throw_index(op + "kv_lens", b, length, 0, p.num_offsets);
    if (p.indptr[b] < 0 || p.indptr[b] > p.num_offsets - length) {
      throw_index(op + "vector_sparse_indptr", b, p.indptr[b], 0, p.num_offsets - length);
    }
    if (first < 0 || first > p.num_indices - blocks)
      throw_index(op + "block_sparse_indptr", b, first, 0, p.num_indices - blocks);
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t rest = length - i * p.block_size, entries = rest < p.block_size ? rest : p.block_size;
      const int64_t offset = p.block_indices[first + i] * p.stride_block, last = offset + (entries - 1) * p.stride_n;
      for (const int64_t end : {offset, last}) {
        if (end < INT32_MIN || end > INT32_MAX)
          throw_index(op + "an offset of block_sparse_indices", first + i, end, INT32_MIN, INT32_MAX);
      }
    }
  }
  parallel_for(p.batch_size, 1, [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; ++b) {
      const int32_t* blocks = p.block_indices + p.block_indptr[b];
      int32_t* out = p.offsets + p.indptr[b];
      for (int64_t i = 0; i < p.kv_lens[b]; ++i) {
        out[i] = static_cast<int32_t>(blocks[i / p.block_size] * p.stride_block + i % p.block_size * p.stride_n);
      }
    }
  });
}

}  // namespace flashinfer::cpu
