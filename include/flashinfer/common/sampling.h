// Sampling, filters and speculative verification: definitions and parameters of the kernels.
//
// A row is x >= 0: probabilities, or softmax(logits / T). A filter keeps {i : x_i >= t, x_i > 0} for one
// threshold t. A sample is the smallest i with sum(kept x_j, j <= i) > u * sum(kept x).
#pragma once

#include <cmath>

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/fixed_sum.h>
#include <flashinfer/common/philox.h>

namespace flashinfer {

// An argument with one value for all outputs, one per output, or one per row.
struct PerRow {
  const void* data;  // null: `real` or `integer` for all
  DType dtype;       // of data: float32, float64, int32, int64
  int64_t output_stride, row_stride;
  double real;
  int64_t integer;

  FLASHINFER_HD int64_t at(int64_t output, int64_t row) const { return output * output_stride + row * row_stride; }

  FLASHINFER_HD double get_real(int64_t output, int64_t row) const {
    if (!data) return real;
    const int64_t i = at(output, row);
    return dtype == DType::kFloat64 ? static_cast<const double*>(data)[i] : static_cast<const float*>(data)[i];
  }

  FLASHINFER_HD int64_t get_integer(int64_t output, int64_t row) const {
    if (!data) return integer;
    const int64_t i = at(output, row);
    return dtype == DType::kInt64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// Key and counter of the draws. Without `slot` the third word of the counter is the output's index.
struct Random {
  PerRow seed, offset, slot;
  bool has_slot;

  FLASHINFER_HD uint64_t draw(int64_t output, uint32_t number) const {
    const int64_t row = has_slot ? slot.get_integer(output, 0) : output;
    return uniform53(static_cast<uint64_t>(seed.get_integer(output, 0)),
                     static_cast<uint64_t>(offset.get_integer(output, 0)), static_cast<uint32_t>(row), number);
  }
};

struct RowsOf {
  const void* data;
  int64_t stride;  // in elements
  DType dtype;
};

struct SampleParams {
  RowsOf input;
  bool is_logits;
  int64_t num_rows, num_outputs, vocab_size;
  PerRow temperature;  // of logits
  bool has_top_k, has_top_p, has_min_p;
  bool top_k_first;  // top_p is relative to the sum that top_k keeps, else to the whole row
  PerRow top_k, top_p, min_p;
  RowsOf indices;  // row of each output; null: output i draws from row i
  Random random;
  void* samples;
  bool wide_samples;  // int64, else int32
  bool* valid;

  bool filters() const { return has_top_k || has_top_p || has_min_p; }
};

enum class RowMap : int32_t { kSoftmax, kTopKRenorm, kTopPRenorm, kTopKMask };

struct MapRowsParams {
  RowMap map;
  RowsOf input;
  void* output;  // contiguous rows; float32 for softmax, else of the input's type
  int64_t num_rows, vocab_size;
  PerRow parameter;  // temperature, k or p
};

struct ChainParams {
  RowsOf draft, target;  // strides between positions
  int64_t draft_batch_stride, target_batch_stride;
  RowsOf draft_ids;  // stride between requests; positions are contiguous
  int64_t batch_size, num_draft, vocab_size;
  Random random;
  int32_t* tokens;  // [batch_size, num_draft + 1]
  void *accepted, *emitted;
  bool wide_accepted, wide_emitted;

  FLASHINFER_HD int64_t draft_token(int64_t request, int64_t position) const {
    const int64_t at = request * draft_ids.stride + position;
    return draft_ids.dtype == DType::kInt64 ? static_cast<const int64_t*>(draft_ids.data)[at]
                                            : static_cast<const int32_t*>(draft_ids.data)[at];
  }
};

struct TopKParams {
  RowsOf input;
  int64_t num_rows, vocab_size, k;
  void* values;      // [num_rows, k], of the input's type
  int64_t* indices;  // [num_rows, k]
};

// Filter of the k largest elements. `on` is false if it keeps all.
struct TopK {
  bool on;
  int64_t k;
};

FLASHINFER_HD TopK top_k_of(int64_t k, int64_t vocab_size) { return {k >= 0 && k < vocab_size, k < 1 ? 1 : k}; }

// Return log2(e) / T. At T = 0 this is the largest float, which keeps the maxima only.
FLASHINFER_HD float exponent_scale(double temperature) {
  if (!(temperature >= 0)) return NAN;
  const double scale = 1.4426950408889634 / temperature;
  return scale < 3.4028234663852886e38 ? static_cast<float>(scale) : 3.4028234663852886e38f;
}

// A row has at most 2^24 elements, because sums of more chunks would overflow their integers.
constexpr int64_t kLongestRow = int64_t{1} << 24;

struct Launch;

// Return the largest row length on the device of a launch, except for draws without filters. `keeps_maxima`:
// for chains, which also keep the maxima of chunks and so need twice the memory.
int64_t longest_row(bool keeps_maxima, const Launch& launch);

void sample_rows(const SampleParams& params, const Launch& launch);
void map_rows(const MapRowsParams& params, const Launch& launch);
void chain_sample(const ChainParams& params, const Launch& launch);
void top_k_rows(const TopKParams& params, const Launch& launch);

}  // namespace flashinfer
