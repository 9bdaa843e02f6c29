// The configuration of a call, by which a module's binding selects one of its parts.
#pragma once

#include <flashinfer/attention/params.h>

#include <string>
#include <utility>

namespace flashinfer {

struct Launch;

// Effects of a built-in variant, as a sum.
constexpr int32_t kDefault = 0, kSoftCap = 1, kAlibi = 2, kRope = 4;

struct AttentionConfig {
  DType q, kv, o;
  int32_t head_dim_qk, head_dim_vo;
  int32_t variant;    // kDefault ...; ignored by modules of a user's variant
  int32_t group = 1;  // num_qo_heads / num_kv_heads; does not select a part

  std::string dtypes_text() const { return std::string(to_string(q)) + ":" + to_string(kv) + ":" + to_string(o); }
  std::string head_dims_text() const {
    return head_dim_qk == head_dim_vo ? std::to_string(head_dim_qk)
                                      : std::to_string(head_dim_qk) + ":" + std::to_string(head_dim_vo);
  }
  std::string variant_text() const {
    if (variant == kDefault) return "default";
    std::string text;
    for (auto [bit, name] : {std::pair{kRope, "rope"}, std::pair{kAlibi, "alibi"}, std::pair{kSoftCap, "soft_cap"}})
      if (variant & bit) text += (text.empty() ? "" : "+") + std::string(name);
    return text;
  }
};

// A backend's limits of work items; see PlanRequest.
struct WorkLimits {
  int32_t tile_rows, concurrency, min_chunk, kv_step, item_keys = 0, merge_keys = 0, whole_keys = 0;
};

// The two functions of each part of a module's kernels. `rows` is the mean number of rows (queries times
// group) of a request, by which a backend chooses its tile. A `tile_rows` other than 0 is an earlier choice.
struct Params;
template <int kPart>
WorkLimits attention_limits(const AttentionConfig& config, int64_t rows, int32_t tile_rows, int device);
template <int kPart>
void attention(const Params& params, const Launch& where);

}  // namespace flashinfer
