// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). All heads read one cache. A row of the cache
// is a key, and its first 512 columns are also the value.
//
// A row of the cache is a latent (ckv) and a rotary key (kpe), in two tensors:
//   S = sm_scale * (q_nope . ckv + q_pe . kpe),   P = softmax(S),   O = P ckv
// This is attention with one KV head of 576 numbers, whose values are the first 512. Plans, work items,
// partial states and merges are those of attention. A model without rotary keys passes zeros for q_pe and
// kpe.
#pragma once

#include <flashinfer/attention/config.h>
#include <flashinfer/attention/params.h>
#include <flashinfer/attention/variant.h>
#include <flashinfer/common/dtype.h>
#include <flashinfer/common/launch.h>
#include <flashinfer/common/profiler.h>

namespace flashinfer {

constexpr int kMlaCkv = 512, kMlaKpe = 64;
constexpr int kMlaScaleColumns = 128, kMlaScales = kMlaCkv / kMlaScaleColumns;  // of a token, one per group of columns

// In AttentionParams, q is q_nope, kv.k the cache of latents and kv.v that of rotary keys. There is one KV
// head, and always a plan.
struct MlaParams : AttentionParams {
  const void* q_pe;  // [tokens, heads, 64], last dimension contiguous
  int64_t q_pe_row, q_pe_head;
  float sm_scale_log2;
  float pe_factor{1.0f};       // factor of q_pe . kpe in 8-bit caches: scale of rotary keys / scale of latents
  const float* maybe_sinks{};  // [heads], a logit in base e that is added to the softmax of each row, or null
  // Scales of 8-bit latents, [pages, page_size, kMlaScales], last dimension contiguous, or null.
  const float* ckv_scales{};
  int64_t ckv_scales_page{}, ckv_scales_row{};

  FLASHINFER_HD const float* scales_of(int64_t page, int64_t row) const {
    return ckv_scales + page * ckv_scales_page + row * ckv_scales_row;
  }
};

// The members of a variant that attention's merges and tile rows read.
struct MlaVariant : AttentionVariantBase {
  float sm_scale_log2;

  template <typename Params>
  FLASHINFER_HD MlaVariant(const Params& params, uint32_t, uint8_t*) : sm_scale_log2(params.sm_scale_log2) {}
};

// Functions of a part of a module, which has one type of queries and one of the cache. All parts have the
// same work limits. `rows`: mean over requests of heads times queries. kProfiler: the kernels write events.
template <int kPart>
WorkLimits mla_limits(int64_t rows, int32_t tile_rows, int device);
template <int kPart, bool kProfiler>
void mla(const Profiled<MlaParams, kProfiler>& params, const Launch& where);

}  // namespace flashinfer
