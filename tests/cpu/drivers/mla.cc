// Latent attention, planned, over a paged cache, against attention in double.
#include <flashinfer/attention/schedule.h>
#include <flashinfer/cpu/attention/mla.h>

#include "harness.h"

using namespace driver;

constexpr int kPageSize = 7, kGap = 8;  // gap after a row of the caches

template <typename T, typename KV = T>
class Case {
 public:
  Case(int heads, std::vector<int32_t> qo_lens, std::vector<int32_t> kv_lens, bool causal)
      : heads_(heads), qo_lens_(std::move(qo_lens)), kv_lens_(std::move(kv_lens)), causal_(causal) {
    for (const int32_t length : qo_lens_) qo_indptr_.push_back(qo_indptr_.back() + length);
    for (const int32_t length : kv_lens_)
      kv_indptr_.push_back(kv_indptr_.back() + (length + kPageSize - 1) / kPageSize);
    for (int32_t page = 0; page < kv_indptr_.back(); ++page) indices_.push_back(page);
    std::shuffle(indices_.begin(), indices_.end(), engine);
    const int64_t rows = qo_indptr_.back() * int64_t{heads}, keys = int64_t{kv_indptr_.back()} * kPageSize;
    q_ = drawn<T>(rows * kMlaCkv), q_pe_ = drawn<T>(rows * kMlaKpe);
    ckv_ = drawn<KV>(keys * kCkvRow), kpe_ = drawn<KV>(keys * kKpeRow);
  }

  // Draw a sink of each head, and the scales of latents of 8 bits. Gaps between the scales' rows are NaN.
  void add_sinks_and_scales() {
    sinks_ = drawn<float>(heads_);
    scales_ = unwritten<float>(int64_t{kv_indptr_.back()} * kPageSize * kScaleRow);
    for (size_t i = 0; i < scales_.size(); ++i)
      if (i % kScaleRow < kMlaScales) scales_[i] = std::exp2(drawn<float>(1)[0]);
  }

  // Give every query and key the same rotary part, of zeros.
  void remove_rotary_parts() { has_rope_ = false, q_pe_.assign(kMlaKpe, T{}), kpe_.assign(kMlaKpe, KV{}); }

  void run(int32_t tile_rows) {
    const WorkLimits limits = cpu::mla_limits(heads_ * qo_lens_[0], tile_rows);
    PlanRequest request{};
    request.batch_size = static_cast<int32_t>(qo_lens_.size());
    request.qo_indptr = qo_indptr_.data(), request.kv_lens = kv_lens_.data();
    request.num_kv_heads = 1, request.group = heads_, request.window_left = -1;
    request.mask_mode = causal_ ? MaskMode::kCausal : MaskMode::kNone;
    request.tile_rows = limits.tile_rows, request.concurrency = 8, request.kv_step = limits.kv_step;
    request.min_chunk = limits.kv_step, request.split = true;
    const Plan made = plan(request);
    const int32_t counts[] = {static_cast<int32_t>(made.items.size()), static_cast<int32_t>(made.merges.size())};
    const int64_t rows = int64_t{qo_indptr_.back()} * heads_, partial_rows = int64_t{made.num_slots} * made.slot_rows;
    auto partial_o = unwritten<float>(partial_rows * kMlaCkv);
    std::vector<PartialSoftmax> partial_ml(partial_rows, {NAN, NAN});
    auto o = unwritten<T>(rows * kMlaCkv);
    auto lse = unwritten<float>(rows);

    MlaParams p{};
    p.q = q_.data(), p.q_row = heads_ * kMlaCkv, p.q_head = kMlaCkv;
    p.q_pe = q_pe_.data(), p.q_pe_row = has_rope_ * heads_ * kMlaKpe, p.q_pe_head = has_rope_ * kMlaKpe;
    p.o = o.data(), p.o_row = heads_ * kMlaCkv, p.o_head = kMlaCkv, p.lse = lse.data();
    p.kv.k = ckv_.data(), p.kv.k_row = kCkvRow, p.kv.k_page = kPageSize * kCkvRow;
    p.kv.v = kpe_.data(), p.kv.v_row = has_rope_ * kKpeRow, p.kv.v_page = has_rope_ * kPageSize * kKpeRow;
    if (!sinks_.empty()) p.maybe_sinks = sinks_.data();
    if (!scales_.empty()) p.ckv_scales = scales_.data();
    p.ckv_scales_row = kScaleRow, p.ckv_scales_page = kPageSize * kScaleRow;
    p.kv.indices = indices_.data(), p.kv.indptr = kv_indptr_.data();
    p.kv.page_size = FastDiv(kPageSize), p.kv.num_pages = kv_indptr_.back();
    p.num_tokens = qo_indptr_.back(), p.num_qo_heads = heads_, p.num_kv_heads = 1, p.group = FastDiv(heads_);
    p.mask_mode = request.mask_mode, p.window_left = -1, p.o_scale = 1;
    p.rope_rcp_scale = p.rope_rcp_theta = 1, p.sm_scale_log2 = static_cast<float>(kScale * M_LOG2E);
    p.items = made.items.data(), p.merges = made.merges.data(), p.counts = counts;
    p.max_items = counts[0], p.max_merges = counts[1];
    p.qo_lens = qo_lens_.data(), p.kv_lens = kv_lens_.data();
    p.tile_rows = limits.tile_rows, p.slot_rows = made.slot_rows;
    p.partial_o = partial_o.data(), p.partial_ml = partial_ml.data();
    cpu::mla<T, KV>(p);
    for (size_t b = 0; b < qo_lens_.size(); ++b)
      for (int32_t query = 0; query < qo_lens_[b]; ++query)
        for (int head = 0; head < heads_; ++head) check_row(static_cast<int32_t>(b), query, head, o, lse);
  }

 private:
  static constexpr double kScale = 0.05;
  static constexpr int64_t kCkvRow = kMlaCkv + kGap, kKpeRow = kMlaKpe + kGap, kScaleRow = kMlaScales + 3;

  double latent(int64_t key, int d) const {
    const double scale = scales_.empty() ? 1.0 : scales_[key * kScaleRow + d / kMlaScaleColumns];
    return value(ckv_[key * kCkvRow + d]) * scale;
  }

  void check_row(int32_t b, int32_t query, int head, const std::vector<T>& o, const std::vector<float>& lse) const {
    const int64_t at = int64_t{qo_indptr_[b] + query} * heads_ + head;
    const int32_t seen = causal_ ? kv_lens_[b] - qo_lens_[b] + query + 1 : kv_lens_[b];
    std::vector<double> want(kMlaCkv);
    double sum = 0;
    for (int32_t key = 0; key < seen; ++key) {
      const int64_t there = int64_t{indices_[kv_indptr_[b] + key / kPageSize]} * kPageSize + key % kPageSize;
      double logit = 0;
      for (int d = 0; d < kMlaCkv; ++d) logit += value(q_[at * kMlaCkv + d]) * latent(there, d);
      for (int d = 0; has_rope_ && d < kMlaKpe; ++d)
        logit += value(q_pe_[at * kMlaKpe + d]) * value(kpe_[there * kKpeRow + d]);
      const double weight = std::exp(kScale * logit);
      sum += weight;
      for (int d = 0; d < kMlaCkv; ++d) want[d] += weight * latent(there, d);
    }
    const double total = sum + (sinks_.empty() ? 0.0 : std::exp(double{sinks_[head]}));
    check("lse", at, lse[at], total == 0 ? -INFINITY : std::log2(total), 2e-5);
    for (int d = 0; d < kMlaCkv; ++d)
      check_rounded("mla", at * kMlaCkv + d, o[at * kMlaCkv + d], total == 0 ? 0 : want[d] / total, 1e-5);
  }

  int heads_;
  std::vector<int32_t> qo_lens_, kv_lens_, qo_indptr_ = {0}, kv_indptr_ = {0}, indices_;
  bool causal_, has_rope_ = true;
  std::vector<float> sinks_, scales_;
  std::vector<T> q_, q_pe_;
  std::vector<KV> ckv_, kpe_;
};

void run() {
  Case<float>(5, {1, 1, 1}, {1, 67, 900}, false).run(0);
  Case<half_t>(16, {1, 2, 1}, {300, 131, 0}, true).run(0);
  Case<bfloat16_t>(3, {9, 2, 1}, {140, 2, 33}, true).run(16);
  Case<half_t>(33, {2}, {129}, false).run(32);
  Case<bfloat16_t, fp8_e4m3_t>(5, {1, 2}, {67, 140}, true).run(16);
  Case<bfloat16_t, fp8_e4m3_t> scaled(5, {1, 2, 3}, {67, 900, 0}, true);
  scaled.add_sinks_and_scales();
  scaled.run(16);
  Case<half_t> without_rope(7, {2, 1}, {131, 20}, true);
  without_rope.remove_rotary_parts();
  without_rope.run(0);
}
