// Multi-head latent attention: all heads read one cache, whose rows are keys and, in their first part, values too.
//
// A row of the cache is a latent (ckv) and a rotary key (kpe), in two tensors. The logit of a query and a key is
// q_nope . ckv + q_pe . kpe, times sm_scale; the output is the weighted sum of latents. It is attention with one key
// head of 576 numbers of which values are the first 512: plans, work items, partial results and merges are attention's.
#pragma once

#include <flashinfer/attention/config.h>
#include <flashinfer/attention/params.h>
#include <flashinfer/attention/variant.h>
#include <flashinfer/common/dtype.h>
#include <flashinfer/common/launch.h>
#include <flashinfer/common/profiler.h>

namespace flashinfer {

constexpr int kMlaCkv = 512, kMlaKpe = 64;

// Of AttentionParams, q is q_nope, kv.k is the latents' cache and kv.v that of rotary keys; there is one key head, and
// always a plan.
struct MlaParams : AttentionParams {
  const void* q_pe;  // [tokens, heads, 64], last dimension contiguous
  int64_t q_pe_row, q_pe_head;
  float sm_scale_log2;
};

// What attention's merges and rows of tiles ask of a variant.
struct MlaVariant : AttentionVariantBase {
  float sm_scale_log2;

  template <typename Params>
  FLASHINFER_HD MlaVariant(const Params& params, uint32_t, uint8_t*) : sm_scale_log2(params.sm_scale_log2) {}
};

// The two functions of each part of a module, of one element type and one of the cache. How kernels want work cut is
// the same for all; `rows`: heads times queries of a request, in the mean. kProfiler: whether the kernels of the module
// write events.
template <int kPart>
WorkLimits mla_limits(int64_t rows, int32_t tile_rows, int device);
template <int kPart, bool kProfiler>
void mla(const Profiled<MlaParams, kProfiler>& params, const Launch& where);

}  // namespace flashinfer
