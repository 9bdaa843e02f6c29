// Decode and prefill, planned, over a paged cache, against attention in double.
#include <flashinfer/attention/schedule.h>
#include <flashinfer/attention/variants.h>
#include <flashinfer/cpu/attention/decode.h>
#include <flashinfer/cpu/attention/prefill.h>

#include "harness.h"

using namespace driver;

constexpr int kQoHeads = 6, kKvHeads = 2, kGroup = kQoHeads / kKvHeads, kPageSize = 5;

struct CaseParams : AttentionParams {
  float sm_scale, logits_soft_cap;
  const float* maybe_alibi_slopes;
};

template <typename Types, bool kBends>
class Case {
  using Q = typename Types::DTypeQ;
  using KV = typename Types::DTypeKV;
  using O = typename Types::DTypeO;
  using Variant = DefaultAttention<false, false, kBends, kBends>;
  static constexpr int kDQ = Types::HEAD_DIM_QK, kDV = Types::HEAD_DIM_VO;

 public:
  Case(std::vector<int32_t> qo_lens, std::vector<int32_t> kv_lens, MaskMode mask, int window_left)
      : qo_lens_(std::move(qo_lens)), kv_lens_(std::move(kv_lens)) {
    for (const int32_t length : qo_lens_) qo_indptr_.push_back(qo_indptr_.back() + length);
    for (const int32_t length : kv_lens_)
      kv_indptr_.push_back(kv_indptr_.back() + (length + kPageSize - 1) / kPageSize);
    for (int32_t page = 0; page < kv_indptr_.back(); ++page) indices_.push_back(page);
    std::shuffle(indices_.begin(), indices_.end(), engine);
    const int64_t tokens = qo_indptr_.back(), rows = int64_t{kv_indptr_.back()} * kPageSize * kKvHeads;
    q_ = drawn<Q>(tokens * kQoHeads * kDQ), k_ = drawn<KV>(rows * kDQ), v_ = drawn<KV>(rows * kDV);
    slopes_ = drawn<float>(kQoHeads, 0.1);
    params_.q = q_.data(), params_.q_row = kQoHeads * kDQ, params_.q_head = kDQ;
    params_.o_row = kQoHeads * kDV, params_.o_head = kDV;
    params_.kv.k = k_.data(), params_.kv.v = v_.data();
    params_.kv.k_head = kDQ, params_.kv.k_row = kKvHeads * kDQ, params_.kv.k_page = kPageSize * kKvHeads * kDQ;
    params_.kv.v_head = kDV, params_.kv.v_row = kKvHeads * kDV, params_.kv.v_page = kPageSize * kKvHeads * kDV;
    params_.kv.indices = indices_.data(), params_.kv.indptr = kv_indptr_.data();
    params_.kv.page_size = FastDiv(kPageSize), params_.kv.num_pages = kv_indptr_.back();
    params_.num_qo_heads = kQoHeads, params_.num_kv_heads = kKvHeads, params_.group = FastDiv(kGroup);
    params_.mask_mode = mask, params_.window_left = window_left;
    params_.o_scale = 1, params_.sm_scale = 0.11f, params_.logits_soft_cap = 2,
    params_.maybe_alibi_slopes = slopes_.data();
    params_.rope_rcp_scale = 1, params_.rope_rcp_theta = 1e-4;
    params_.qo_lens = qo_lens_.data(), params_.kv_lens = kv_lens_.data();
    if (mask == MaskMode::kCustom) draw_mask();
  }

  template <typename Kernel>
  void run(const char* what, const WorkLimits& limits, const Kernel& kernel) {
    PlanRequest request{};
    request.batch_size = static_cast<int32_t>(qo_lens_.size());
    request.qo_indptr = qo_indptr_.data(), request.kv_lens = kv_lens_.data();
    request.num_kv_heads = kKvHeads, request.group = kGroup;
    request.mask_mode = params_.mask_mode, request.window_left = params_.window_left;
    request.tile_rows = limits.tile_rows, request.concurrency = 8 * kKvHeads, request.kv_step = limits.kv_step;
    request.min_chunk = limits.kv_step, request.split = true;
    const Plan made = plan(request);
    const int32_t counts[] = {static_cast<int32_t>(made.items.size()), static_cast<int32_t>(made.merges.size())};
    const int64_t partial_rows = int64_t{made.num_slots} * kKvHeads * made.slot_rows;
    auto partial_o = unwritten<float>(partial_rows * kDV);
    std::vector<PartialSoftmax> partial_ml(partial_rows, {NAN, NAN});
    auto o = unwritten<O>(q_.size() / kDQ * kDV);
    auto lse = unwritten<float>(q_.size() / kDQ);
    params_.items = made.items.data(), params_.merges = made.merges.data(), params_.counts = counts;
    params_.tile_rows = request.tile_rows, params_.slot_rows = made.slot_rows;
    params_.partial_o = partial_o.data(), params_.partial_ml = partial_ml.data();
    params_.o = o.data(), params_.lse = lse.data();
    kernel(params_);
    for (size_t b = 0; b < qo_lens_.size(); ++b)
      for (int32_t query = 0; query < qo_lens_[b]; ++query)
        for (int head = 0; head < kQoHeads; ++head) check_row(what, static_cast<int32_t>(b), query, head, o, lse);
  }

  void decode() {
    run("decode", cpu::decode_limits({DType::kOther, DType::kFloat16, DType::kOther, kDQ, kDV, 0}, kGroup, 0),
        [](const CaseParams& p) { cpu::decode<Variant, Types>(p); });
  }
  void prefill(int32_t tile_rows) {
    run("prefill", cpu::prefill_limits(0, tile_rows), [](const CaseParams& p) { cpu::prefill<Variant, Types>(p); });
  }

 private:
  void draw_mask() {
    mask_indptr_ = {0};
    for (size_t b = 0; b < qo_lens_.size(); ++b)
      mask_indptr_.push_back(mask_indptr_.back() + (qo_lens_[b] * kv_lens_[b] + 7) / 8);
    mask_.resize(mask_indptr_.back());
    for (uint8_t& byte : mask_) byte = static_cast<uint8_t>(engine());
    params_.custom_mask = mask_.data(), params_.mask_indptr = mask_indptr_.data();
  }

  bool sees(int32_t b, int32_t query, int32_t key) const {
    const int32_t position = kv_lens_[b] - qo_lens_[b] + query;
    if (params_.window_left >= 0 && key + params_.window_left < position) return false;
    if (params_.mask_mode == MaskMode::kCausal) return key <= position;
    if (params_.mask_mode == MaskMode::kNone) return true;
    const int32_t bit = query * kv_lens_[b] + key;
    return mask_[mask_indptr_[b] + bit / 8] >> bit % 8 & 1;
  }

  // Return a row of dim numbers, rotated by a position if the case rotates.
  template <typename T>
  std::vector<double> row(const T* from, int dim, int32_t position) const {
    std::vector<double> x(dim);
    for (int d = 0; d < dim; ++d) x[d] = value(from[d]);
    for (int i = 0; Types::kRope && i < dim / 2; ++i) {
      const double angle = position * std::pow(1e-4, 2.0 * i / dim), a = x[i], b = x[i + dim / 2];
      x[i] = a * std::cos(angle) - b * std::sin(angle), x[i + dim / 2] = b * std::cos(angle) + a * std::sin(angle);
    }
    return x;
  }

  void check_row(const char* what, int32_t b, int32_t query, int head, const std::vector<O>& o,
                 const std::vector<float>& lse) const {
    const int64_t at = int64_t{qo_indptr_[b] + query} * kQoHeads + head;
    const int32_t position = kv_lens_[b] - qo_lens_[b] + query;
    const auto q = row(&q_[at * kDQ], kDQ, position);
    std::vector<double> want(kDV);
    double total = 0;
    for (int32_t key = 0; key < kv_lens_[b]; ++key) {
      if (!sees(b, query, key)) continue;
      const int64_t page = indices_[kv_indptr_[b] + key / kPageSize];
      const int64_t there = (page * kPageSize + key % kPageSize) * kKvHeads + head / kGroup;
      const auto k = row(&k_[there * kDQ], kDQ, key);
      double logit = 0;
      for (int d = 0; d < kDQ; ++d) logit += q[d] * k[d];
      logit *= params_.sm_scale;
      if (kBends) logit = 2 * std::tanh((logit + slopes_[head] * (key - position)) / 2);
      const double weight = std::exp(logit);
      total += weight;
      for (int d = 0; d < kDV; ++d) want[d] += weight * value(v_[there * kDV + d]);
    }
    check("lse", at, lse[at], total == 0 ? -INFINITY : std::log2(total), 2e-5);
    for (int d = 0; d < kDV; ++d)
      check_rounded(what, at * kDV + d, o[at * kDV + d], total == 0 ? 0 : want[d] / total, 1e-5);
  }

  std::vector<int32_t> qo_lens_, kv_lens_, qo_indptr_ = {0}, kv_indptr_ = {0}, indices_, mask_indptr_;
  std::vector<uint8_t> mask_;
  std::vector<Q> q_;
  std::vector<KV> k_, v_;
  std::vector<float> slopes_;
  CaseParams params_{};
};

constexpr auto kPlain = PosEncodingMode::kNone, kRotated = PosEncodingMode::kRopeLlama;

void run() {
  using Floats = cpu::AttentionTypes<float, float, float, 64, 72, kPlain>;
  using Halves = cpu::AttentionTypes<half_t, half_t, half_t, 128, 128, kRotated>;
  using Mixed = cpu::AttentionTypes<bfloat16_t, fp8_e4m3_t, bfloat16_t, 40, 40, kPlain>;
  Case<Floats, false>({1, 1, 1}, {1, 67, 700}, MaskMode::kNone, -1).decode();
  Case<Halves, false>({1, 4, 1}, {33, 130, 0}, MaskMode::kCausal, 50).decode();
  Case<Mixed, true>({1, 1, 2}, {300, 5, 64}, MaskMode::kNone, -1).decode();
  Case<Floats, false>({19, 1, 40}, {150, 3, 40}, MaskMode::kCausal, -1).prefill(16);
  Case<Floats, false>({7, 12}, {290, 45}, MaskMode::kCustom, -1).prefill(32);
  Case<Halves, false>({9, 20}, {9, 150}, MaskMode::kNone, 31).prefill(16);
  Case<Mixed, true>({17, 30}, {140, 31}, MaskMode::kCausal, -1).prefill(64);
}
