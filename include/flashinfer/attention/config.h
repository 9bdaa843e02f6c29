// Which instance of a kernel a call wants: what a module's configuration header chooses its part by.
#pragma once

#include <flashinfer/attention/params.h>
#include <flashinfer/common/dispatch.h>

#include <string>
#include <utility>

namespace flashinfer {

struct Launch;

struct AttentionConfig {
  DType q, kv, o;
  int32_t head_dim_qk, head_dim_vo;
  int32_t variant;  // of the library's own: what it does, as a sum of kSoftCap, kAlibi and kRope

  static constexpr int32_t kSoftCap = 1, kAlibi = 2, kRope = 4;

  bool is_dtypes(DType as_q, DType as_kv, DType as_o) const { return q == as_q && kv == as_kv && o == as_o; }
  bool is_head_dims(int qk, int vo) const { return head_dim_qk == qk && head_dim_vo == vo; }
  bool is_variant(int32_t what) const { return variant == what; }

  std::string dtypes_text() const { return std::string(to_string(q)) + ":" + to_string(kv) + ":" + to_string(o); }
  std::string head_dims_text() const {
    return head_dim_qk == head_dim_vo ? std::to_string(head_dim_qk)
                                      : std::to_string(head_dim_qk) + ":" + std::to_string(head_dim_vo);
  }
  std::string variant_text() const {
    if (variant == 0) return "default";
    std::string text;
    for (auto [bit, name] : {std::pair{kRope, "rope"}, std::pair{kAlibi, "alibi"}, std::pair{kSoftCap, "soft_cap"}})
      if (variant & bit) text += (text.empty() ? "" : "+") + std::string(name);
    return text;
  }
};

// How a backend wants its work cut; see PlanRequest.
struct WorkLimits {
  int32_t tile_rows, places, min_chunk, kv_step;
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
