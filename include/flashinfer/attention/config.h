// Which instance of a kernel a call wants: what a module's binding chooses among its parts by.
#pragma once

#include <flashinfer/attention/params.h>

#include <string>
#include <utility>

namespace flashinfer {

struct Launch;

// What a variant of the library's own does, a sum of these.
constexpr int32_t kDefault = 0, kSoftCap = 1, kAlibi = 2, kRope = 4;

struct AttentionConfig {
  DType q, kv, o;
  int32_t head_dim_qk, head_dim_vo;
  int32_t variant;    // kDefault ...; not looked at where the module is a user's
  int32_t group = 1;  // num_qo_heads / num_kv_heads; no part is chosen by it

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

// How a backend wants its work cut; see PlanRequest.
struct WorkLimits {
  int32_t tile_rows, places, min_chunk, kv_step, item_keys = 0, merge_keys = 0, whole_keys = 0;
};

// The two functions that the kernels of each part of a module give to its binding. `rows` is the mean number of rows
// (queries times group) of a request, by which a backend chooses its tile; `tile_rows` other than 0 is one that was
// chosen before.
struct Params;
template <int kPart>
WorkLimits attention_limits(const AttentionConfig& config, int64_t rows, int32_t tile_rows, int device);
template <int kPart>
void attention(const Params& params, const Launch& where);

}  // namespace flashinfer
