// The part of a module that computes a configuration, found in the lists of its configuration header.
#pragma once

#include <iterator>
#include <tuple>

#include "attention_config.h"

namespace flashinfer {

constexpr int kNumParts = static_cast<int>(std::size(kParts));

// Return the part of a configuration. Throw if this module was not built for it.
inline int part_of(const AttentionConfig& config) {
  const std::tuple<DType, DType, DType> dtypes(config.q, config.kv, config.o);
  const std::tuple<int, int> head_dims(config.head_dim_qk, config.head_dim_vo);
  if (find_row(kDtypes, dtypes) < 0) throw_not_covered("dtypes", config.dtypes_text(), kDtypesText);
  if (find_row(kHeadDims, head_dims) < 0) throw_not_covered("head_dims", config.head_dims_text(), kHeadDimsText);
#if defined(FLASHINFER_BUILTIN_VARIANTS)
  const std::tuple<int> variant(config.variant);
  if (find_row(kVariants, variant) < 0) throw_not_covered("variants", config.variant_text(), kVariantsText);
  return find_row(kParts, std::tuple_cat(dtypes, head_dims, variant));
#else
  return find_row(kParts, std::tuple_cat(dtypes, head_dims));
#endif
}

inline void require_covered(const AttentionConfig& config) { part_of(config); }

// The two functions of a module's kernels, for a configuration that this module covers.
inline WorkLimits attention_limits(const AttentionConfig& config, int64_t rows, int32_t tile_rows, int device) {
  return call_numbered<kNumParts>(kNumParts == 1 ? 0 : part_of(config),
                                  [&](auto part) { return attention_limits<part>(config, rows, tile_rows, device); });
}

inline void attention(const Params& params, const AttentionConfig& config, const Launch& where) {
  call_numbered<kNumParts>(kNumParts == 1 ? 0 : part_of(config), [&](auto part) { attention<part>(params, where); });
}

}  // namespace flashinfer
