// Arguments of attention's operators, in the order of their schemas. flashinfer/_attention/signature.py has
// the same lists.
#pragma once

#include <type_traits>

#define FLASHINFER_BINDING 1
#include <flashinfer/attention/schedule.h>

#include "attention/parts.h"
#include "binding/arguments.h"
#include "binding/binding.h"

namespace flashinfer::binding {

#define FLASHINFER_ATTENTION_TENSORS(X) \
  X(Tensor, q)                          \
  X(Tensor, k)                          \
  X(Tensor, v)                          \
  X(Written<'a'>, out)                  \
  X(WrittenOptional<'b'>, lse)
FLASHINFER_ARGUMENTS(TensorArguments, FLASHINFER_ATTENTION_TENSORS)

// Arguments of a call other than queries, keys, values, results and a variant's own parameters.
#define FLASHINFER_ATTENTION_CALL(X, Workspace) \
  X(OptionalTensor, kv_indptr)                  \
  X(OptionalTensor, kv_indices)                 \
  X(OptionalTensor, plan)                       \
  X(Workspace, float_workspace)                 \
  X(int64_t, batch_size)                        \
  X(int64_t, max_items)                         \
  X(int64_t, max_merges)                        \
  X(int64_t, max_slots)                         \
  X(int64_t, tile_rows)                         \
  X(int64_t, slot_rows)                         \
  X(OptionalTensor, custom_mask)                \
  X(OptionalTensor, mask_indptr)                \
  X(OptionalTensor, prefix_len)                 \
  X(OptionalTensor, token_pos_in_items)         \
  X(int64_t, token_pos_in_items_len)            \
  X(int64_t, kv_layout)                         \
  X(int64_t, mask_mode)                         \
  X(int64_t, window_left)                       \
  X(double, o_scale)                            \
  X(double, rope_scale)                         \
  X(double, rope_theta)                         \
  X(int64_t, variant)
// run() writes to the workspace. bind() only stores its address.
#define FLASHINFER_ATTENTION_RUN(X) FLASHINFER_ATTENTION_CALL(X, WrittenOptional<'c'>)
#define FLASHINFER_ATTENTION_BIND(X) FLASHINFER_ATTENTION_CALL(X, OptionalTensor)
FLASHINFER_ARGUMENTS(RunArguments, FLASHINFER_ATTENTION_RUN)
FLASHINFER_ARGUMENTS(BindArguments, FLASHINFER_ATTENTION_BIND)

// Parameters of a variant: the configuration's lists, X(name, type, optional) of tensors and X(name, type) of
// scalars.
struct VariantArguments {
#define FLASHINFER_TENSOR_(name, type, optional) std::conditional_t<optional, OptionalTensor, Tensor> name;
#define FLASHINFER_SCALAR_(name, type) std::conditional_t<std::is_integral_v<type>, int64_t, double> name;
  ADDITIONAL_TENSORS(FLASHINFER_TENSOR_)
  ADDITIONAL_SCALARS(FLASHINFER_SCALAR_)
#undef FLASHINFER_TENSOR_
#undef FLASHINFER_SCALAR_

  static VariantArguments take([[maybe_unused]] const StableIValue*& next) {
#define FLASHINFER_TENSOR_(name, type, optional) \
  Argument<std::conditional_t<optional, OptionalTensor, Tensor>>::take(*next++),
#define FLASHINFER_SCALAR_(name, type) \
  Argument<std::conditional_t<std::is_integral_v<type>, int64_t, double>>::take(*next++),
    return {ADDITIONAL_TENSORS(FLASHINFER_TENSOR_) ADDITIONAL_SCALARS(FLASHINFER_SCALAR_)};
#undef FLASHINFER_TENSOR_
#undef FLASHINFER_SCALAR_
  }

  // ADDITIONAL_SCHEMA begins with ", ", but each list ends with it.
  static std::string text() {
    const std::string all(ADDITIONAL_SCHEMA);
    return all.empty() ? all : all.substr(2) + ", ";
  }
};

// Another plan of the calls that a handle stands for.
#define FLASHINFER_ATTENTION_REBIND(X) \
  X(int64_t, handle)                   \
  X(OptionalTensor, plan)              \
  X(OptionalTensor, kv_indptr)         \
  X(OptionalTensor, kv_indices)        \
  X(int64_t, batch_size)               \
  X(int64_t, max_items)                \
  X(int64_t, max_merges)               \
  X(int64_t, max_slots)                \
  X(int64_t, tile_rows)                \
  X(int64_t, slot_rows)                \
  X(int64_t, num_queries)              \
  X(int64_t, kv_size)
FLASHINFER_ARGUMENTS(RebindArguments, FLASHINFER_ATTENTION_REBIND)

// Expectations of bind() about later calls. -1 accepts anything.
#define FLASHINFER_ATTENTION_EXPECTED(X) \
  X(int64_t, handle)                     \
  X(int64_t, q_dims)                     \
  X(int64_t, num_queries)                \
  X(bool, allows_more_queries)           \
  X(int64_t, num_qo_heads)               \
  X(int64_t, num_kv_heads)               \
  X(int64_t, head_dim_qk)                \
  X(int64_t, head_dim_vo)                \
  X(int64_t, dtype_q)                    \
  X(int64_t, dtype_kv)                   \
  X(int64_t, page_size)                  \
  X(int64_t, kv_size)
FLASHINFER_ARGUMENTS(ExpectedArguments, FLASHINFER_ATTENTION_EXPECTED)

// Arguments of bound calls. Keys and values may be one cache of both, in k. Queries without a dimension of
// tokens belong to one token. Absent scales are those of bind(): torch needs as long for a number as for a
// tensor, and next to nothing for None.
#define FLASHINFER_ATTENTION_BOUND_TENSORS(X) X(Tensor, q) X(Tensor, k) X(OptionalTensor, v)
#define FLASHINFER_ATTENTION_BOUND_RESULTS(X) X(Written<'a'>, out) X(WrittenOptional<'b'>, lse)
#define FLASHINFER_ATTENTION_BOUND_CALL(X) \
  X(int64_t, handle)                       \
  X(std::optional<double>, sm_scale)       \
  X(std::optional<double>, o_scale)
FLASHINFER_ARGUMENTS(BoundTensors, FLASHINFER_ATTENTION_BOUND_TENSORS)
FLASHINFER_ARGUMENTS(BoundResults, FLASHINFER_ATTENTION_BOUND_RESULTS)
FLASHINFER_ARGUMENTS(BoundScales, FLASHINFER_ATTENTION_BOUND_CALL)

}  // namespace flashinfer::binding
