// The chunk form on the CPU, with chunks of sixteen tokens: matrix products replace a pass over the state per
// token.
//   R = V - e^G K S    r = R - Z (beta R)    u = beta r
//   O = scale e^G Q S + P u    S = e^Gn S + K' e^(Gn-G) u
#pragma once

#include <flashinfer/cpu/delta_rule/chunk.h>
#include <flashinfer/cpu/parallel.h>

namespace flashinfer::cpu {

template <typename T>
class DeltaChunkScan {
 public:
  explicit DeltaChunkScan(const DeltaRuleParams& p)
      : p_(p), in_(p.in), rows_(p.in.key_dim), scale_(static_cast<float>(p.in.scale.get())) {}

  // Compute columns [begin, end) of one value head of sequence n. `begin` is a multiple of kDeltaColumns.
  void run(int64_t n, int64_t value_head, int64_t begin, int64_t end) {
    const Sequence tokens = sequence_of(in_, n);
    const TokenRows<T> rows(in_, value_head);
    const int64_t head = n * in_.num_value_heads + value_head, panel = kDeltaColumns * rows_.pad;
    state_.resize((end - begin + kDeltaColumns - 1) / kDeltaColumns * panel);
    for (int64_t first = begin; first < end; first += kDeltaColumns)
      load_panel(in_, p_.initial_state, head, first, rows_.pad, of(first - begin));
    for (int64_t number = 0; tokens.begin + number * kChunk < tokens.end; ++number) {
      rows_.load(rows, tokens, number);
      queue_prefetches(rows, tokens, begin, end);
      rows_.transpose_keys(), rows_.transpose_queries();
      factors_.load(rows, rows_.batch, rows_.first, rows_.count);
      factors_.correlate(rows_.pad, rows_.k(), rows_.q(), rows_.keys(), scale_);
      for (int64_t first = begin; first < end; first += kDeltaColumns) step(rows, first, of(first - begin));
      if (const int64_t row = p_.checkpoint_row(n, rows_.first + rows_.count - tokens.begin); row >= 0)
        store_states(p_.checkpoints, p_.checkpoint_dtype, row * in_.num_value_heads + value_head, begin, end);
    }
    if (p_.final_state) store_states(p_.final_state, DType::kFloat32, head, begin, end);
  }

 private:
  void store_states(void* states, DType dtype, int64_t head, int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kDeltaColumns)
      store_panel(in_, states, head, first, rows_.pad, of(first - begin), dtype);
  }
  void queue_prefetches(const TokenRows<T>& rows, const Sequence& tokens, int64_t begin, int64_t end) {
    prefetcher_.clear();
    const int64_t first = rows_.first + kChunk, last = std::min(first + kChunk, tokens.end);
    for (int64_t t = first; t < last; ++t) {
      prefetcher_.add(rows.raw_key(tokens.batch, t), in_.key_dim);
      prefetcher_.add(rows.raw_query(tokens.batch, t), in_.key_dim);
      prefetcher_.add(rows.value(tokens.batch, t) + begin, end - begin);
    }
  }

  float* of(int64_t column) { return state_.data() + column * rows_.pad; }

  void step(const TokenRows<T>& rows, int64_t first, float* state) {
    constexpr int kSize = kDeltaColumns * kChunk;
    alignas(64) float v[kSize], r[kSize], u[kSize], o[kSize];  // each [kDeltaColumns, kChunk]
    ChunkRows<T>& c = rows_;
    const ChunkFactors& f = factors_;
    const int64_t count = std::min<int64_t>(kDeltaColumns, in_.value_dim - first);
    load_transposed(c.count, count, v, [&](int i) { return rows.value(c.batch, c.first + i) + first; });
    multiply(kDeltaColumns, 2 * kChunk, c.pad, {state, c.pad, 1}, c.keys(),
             [&](int64_t row, int64_t column, vfloat sums) {
               const int64_t i = column % kChunk, at = row * kChunk + i;
               const vfloat decayed = sums * load(f.decay + i);
               prefetcher_.prefetch(2);  // with 128 keys and columns, 256 calls per chunk issue 384 lines
               if (column >= kChunk) return store(o + at, decayed * scale_);
               const vfloat rest = load(v + at) - decayed;
               store(r + at, rest), store(u + at, rest * load(f.beta + i));
             });
    multiply(kDeltaColumns, kChunk, kChunk, {u, kChunk, 1}, {f.zt, kChunk}, [&](int64_t row, int64_t i, vfloat sums) {
      const int64_t at = row * kChunk + i;
      store(r + at, (load(r + at) - sums) * load(f.beta + i));
    });
    multiply(kDeltaColumns, kChunk, kChunk, {r, kChunk, 1}, {f.pt, kChunk}, [&](int64_t row, int64_t i, vfloat sums) {
      const int64_t at = row * kChunk + i;
      store(o + at, load(o + at) + sums);
      store(u + at, load(r + at) * load(f.rest + i));
    });
    advance(state, c.pad, f.last, kChunk, u, c.k());
    store_transposed(c.count, count, o, [&](int i) {
      return static_cast<T*>(p_.o) + rows.number(c.batch, c.first + i) * in_.value_dim + first;
    });
  }

  const DeltaRuleParams& p_;
  const DeltaRuleInputs& in_;
  ChunkRows<T> rows_;
  ChunkFactors factors_;
  Prefetcher prefetcher_;
  Lines state_;
  float scale_;
};

template <typename T>
void delta_rule_chunks(const DeltaRuleParams& p) {
  const int64_t scans = p.in.num_sequences * p.in.num_value_heads, values = p.in.value_dim;
  // With enough heads a task has all columns of a head, because each task recomputes the terms that columns
  // share.
  const int64_t panels = (values + kDeltaColumns - 1) / kDeltaColumns, enough = 2 * num_threads();
  const int64_t slices = std::min(panels, (enough + scans - 1) / std::max<int64_t>(scans, 1));
  const int64_t width = (panels + slices - 1) / std::max<int64_t>(slices, 1) * kDeltaColumns;
  const int64_t tasks = scans * slices;
  parallel_tasks(tasks, [&](auto next) {
    DeltaChunkScan<T> scan(p);
    for (int64_t task = next(); task < tasks; task = next()) {
      const int64_t begin = task % slices * width, head = task / slices;
      scan.run(head / p.in.num_value_heads, head % p.in.num_value_heads, begin, std::min(begin + width, values));
    }
  });
}

}  // namespace flashinfer::cpu
