// Operators with few arguments. bind() takes all other arguments once, and stores the checked result under a
// handle.
//
// torch spends as much time on passing an argument from Python as this file spends on checking it, and a call
// has thirty. The caller chooses the handle. A handle that is not bound is an error. Bound tensors are not
// owned: the caller keeps them alive until unbind().
#pragma once

#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "attention/run.h"

namespace flashinfer::binding {

// Properties that a call must have. -1 accepts anything.
struct Expected {
  int64_t q_dims, num_queries;
  bool allows_more_queries;  // than the plan: buffers of a captured graph may be larger
  int64_t num_qo_heads, num_kv_heads;
  AttentionConfig config;
  int64_t page_size, kv_size;  // kv_size: pages or ragged keys that the tables use

  Expected(const Check& check, const ExpectedArguments& given)
      : q_dims(given.q_dims),
        num_queries(given.num_queries),
        allows_more_queries(given.allows_more_queries),
        num_qo_heads(given.num_qo_heads),
        num_kv_heads(given.num_kv_heads),
        page_size(given.page_size),
        kv_size(given.kv_size) {
    config.head_dim_qk = check.int32("head_dim_qk", given.head_dim_qk);
    config.head_dim_vo = check.int32("head_dim_vo", given.head_dim_vo);
    config.q = config.o = static_cast<DType>(given.dtype_q);
    config.kv = static_cast<DType>(given.dtype_kv);
    if (q_dims != 2 && q_dims != 3) check.fail("q_dims", "got " + std::to_string(q_dims) + ", wanted 2 or 3");
  }

  void check(const Check& check, const Inputs& inputs) const {
    check.dtype(inputs.q, {config.q});
    check.dtype(inputs.k, {config.kv});
    size(check, inputs.q, 2, config.head_dim_qk);
    size(check, inputs.v, -1, config.head_dim_vo);
    size(check, inputs.q, 1, num_qo_heads);
    size(check, inputs.k, inputs.dims.head, num_kv_heads);
    if (!allows_more_queries || inputs.num_tokens() < num_queries) size(check, inputs.q, 0, num_queries);
    if (inputs.paged) size(check, inputs.k, inputs.dims.row, page_size);
    if (inputs.k.size(inputs.paged ? inputs.dims.page : inputs.dims.row) < kv_size)
      check.fail(inputs.k, "has fewer rows or pages than the tables of the plan use");
  }

 private:
  static void size(const Check& check, const View& arg, int64_t dim, int64_t wanted) {
    if (wanted >= 0 && arg.size(dim) != wanted)
      check.fail(arg, "got size " + std::to_string(arg.size(dim)) + " of dimension " + std::to_string(dim) +
                          ", wanted " + std::to_string(wanted) + " as was bound");
  }
};

struct Bound {
  Expected expected;
  CallArguments arguments;
  mutable std::atomic<int64_t> stream{-1};  // of the last call

  Bound(const Check& check, const ExpectedArguments& call, const BindArguments& given,
        const VariantArguments& parameters)
      : expected(check, call), arguments(check, given, parameters, ArgumentDevice()) {
    expected.config.variant = arguments.variant;
    require_covered(expected.config);
  }

  Bound(const Check& check, const Bound& like, const RebindArguments& given)
      : expected(like.expected), arguments(like.arguments), stream(like.stream.load()) {
    expected.num_queries = given.num_queries, expected.kv_size = given.kv_size;
    arguments.replan(check, given);
  }
};

// The handles of this process. Never destroyed: a thread may still call when the process ends.
class BoundTable {
 public:
  static BoundTable& get() {
    static auto* table = new BoundTable;
    return *table;
  }

  void put(int64_t handle, std::shared_ptr<const Bound> bound) {
    const std::lock_guard<std::mutex> lock(mutex_);
    table_[handle] = std::move(bound);
  }
  void drop(int64_t handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    table_.erase(handle);
  }
  std::shared_ptr<const Bound> find(const Check& check, int64_t handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = table_.find(handle);
    if (found == table_.end()) check.fail("handle", "got " + std::to_string(handle) + ", wanted one that is bound");
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const Bound>> table_;
};

inline void bind(StableIValue* stack, uint64_t, uint64_t) {
  const Check check("bind");
  const StableIValue* next = stack;
  const ExpectedArguments call = ExpectedArguments::take(next);
  const BindArguments given = BindArguments::take(next);
  const VariantArguments parameters = VariantArguments::take(next);
  BoundTable::get().put(call.handle, std::make_shared<const Bound>(check, call, given, parameters));
}

// Give a handle's calls the tables of another plan. An error changes nothing.
inline void rebind(StableIValue* stack, uint64_t, uint64_t) {
  const Check check("rebind");
  const StableIValue* next = stack;
  const RebindArguments given = RebindArguments::take(next);
  const std::shared_ptr<const Bound> like = BoundTable::get().find(check, given.handle);
  BoundTable::get().put(given.handle, std::make_shared<const Bound>(check, *like, given));
}

inline void unbind(int64_t handle) { BoundTable::get().drop(handle); }

// Return the stream of a handle's last call, so that a plan waits for it before it overwrites a buffer.
inline int64_t stream_of(int64_t handle) { return BoundTable::get().find(Check("stream_of"), handle)->stream; }

// Sizes and strides of a view whose dimensions differ from its tensor's.
struct Dims {
  int64_t sizes[4], strides[4];
};

// View queries or output of one token, [heads, dim], as [1, heads, dim].
inline View as_tokens(const View& one, Dims& dims) {
  View all = one;
  dims.sizes[0] = 1, dims.strides[0] = 0;
  for (int64_t dim = 0; dim < 2; ++dim) dims.sizes[dim + 1] = one.sizes[dim], dims.strides[dim + 1] = one.strides[dim];
  all.ndim = 3, all.sizes = dims.sizes, all.strides = dims.strides;
  return all;
}

// View keys or values in pages of one token, [pages, heads, dim], with the missing dimension of tokens.
inline View as_pages(const View& given, int64_t token_dim, Dims& dims) {
  View all = given;
  for (int64_t dim = 0; dim < 4; ++dim) {
    const int64_t from = dim - (dim > token_dim);
    dims.sizes[dim] = dim == token_dim ? 1 : given.sizes[from], dims.strides[dim] = given.strides[from];
  }
  all.ndim = 4, all.sizes = dims.sizes, all.strides = dims.strides;
  return all;
}

// Return keys (0) or values (1) of a cache of both.
inline View half_of(const View& cache, int64_t which, const char* name, Dims& dims) {
  View half = cache;
  for (int64_t dim = 0; dim < 4; ++dim) {
    const int64_t from = dim + (dim > 0);
    dims.sizes[dim] = cache.sizes[from], dims.strides[dim] = cache.strides[from];
  }
  half.name = name, half.ndim = 4, half.numel = cache.numel / 2, half.sizes = dims.sizes, half.strides = dims.strides;
  half.data = static_cast<char*>(cache.data) + which * cache.strides[1] * size_of(cache.dtype);
  return half;
}

// The arguments of every bound call, as views with the dimensions that kernels expect.
class BoundCall {
 public:
  BoundCall(const Check& check, const BoundTensors& tensors, const BoundScales& scales)
      : check_(check),
        like_(tensors.q),
        scales_(scales),
        bound_(BoundTable::get().find(check, scales.handle)),
        q_(tokens(View(tensors.q, "q"), q_dims_)),
        whole_(tensors.k, "k"),
        k_(tensors.v ? pages(whole_, k_dims_) : half(0, "k", k_dims_)),
        v_(tensors.v ? pages(View(*tensors.v, "v"), v_dims_) : half(1, "v", v_dims_)),
        inputs_(check, q_, k_, v_, bound_->arguments) {
    bound_->expected.check(check, inputs_);
  }

  // Return a new output: [(tokens,) heads, head_dim of values].
  Tensor new_out() const {
    const int64_t sizes[] = {inputs_.num_tokens(), inputs_.num_heads(), v_.size(-1)};
    return empty(sizes + skipped(), 3 - skipped(), like_);
  }
  Tensor new_lse() const {
    const int64_t sizes[] = {inputs_.num_tokens(), inputs_.num_heads()};
    return empty(sizes + skipped(), 2 - skipped(), like_, aoti_torch_dtype_float32());
  }

  void check_results(const Tensor& out, const OptionalTensor& lse) const {
    Dims dims;
    const View view = tokens(View(out, "out"), dims);
    check_.dtype(view, {bound_->expected.config.o});
    inputs_.check_out(check_, view);
    if (lse) inputs_.check_lse(check_, View(*lse, "lse"), view);
  }

  void run(const Tensor& out, float* lse) const {
    Params params = bound_->arguments.params;
    if (scales_.sm_scale) {
      if (!std::isfinite(*scales_.sm_scale)) check_.fail("sm_scale", "got no finite number");
      params.sm_scale = static_cast<float>(*scales_.sm_scale);
    }
    if (scales_.o_scale) params.o_scale = static_cast<float>(*scales_.o_scale);
    Dims dims;
    bound_->stream = attend(check_, params, bound_->arguments, inputs_, tokens(View(out, "out"), dims), lse,
                            bound_->expected.config, like_);
  }

 private:
  int64_t skipped() const { return 3 - bound_->expected.q_dims; }

  View tokens(const View& given, Dims& dims) const {
    check_.rank(given, bound_->expected.q_dims, bound_->expected.q_dims);
    return given.ndim == 2 ? as_tokens(given, dims) : given;
  }

  View pages(const View& given, Dims& dims) const {
    const bool of_one = bound_->arguments.paged && bound_->expected.page_size == 1 && given.ndim == 3;
    return of_one ? as_pages(given, 1 + bound_->arguments.kv_layout, dims) : given;
  }

  View half(int64_t which, const char* name, Dims& dims) const {
    check_.rank(whole_, 5, 5);
    if (whole_.size(1) != 2) check_.fail(whole_, "got another size of dimension 1 than 2, keys and values");
    return half_of(whole_, which, name, dims);
  }

  const Check& check_;
  const Tensor& like_;
  const BoundScales& scales_;
  const std::shared_ptr<const Bound> bound_;
  Dims q_dims_, k_dims_, v_dims_;
  const View q_, whole_, k_, v_;
  const Inputs inputs_;
};

inline float* floats_of(const Tensor& tensor) {
  void* data;
  require(aoti_torch_get_data_ptr(tensor.get(), &data), "the data");
  return static_cast<float*>(data);
}

template <bool kWithLse>
void run_bound(StableIValue* stack, uint64_t, uint64_t) {
  const Check check(FLASHINFER_ATTENTION_NAME);
  const StableIValue* next = stack;
  const BoundTensors tensors = BoundTensors::take(next);
  const BoundScales scales = BoundScales::take(next);
  const BoundCall call(check, tensors, scales);
  Tensor out = call.new_out();
  if constexpr (kWithLse) {
    Tensor lse = call.new_lse();
    call.run(out, floats_of(lse));
    put(stack, std::tuple<Tensor, Tensor>(std::move(out), std::move(lse)));
  } else {
    call.run(out, nullptr);
    put(stack, std::move(out));
  }
}

inline void run_bound_out(StableIValue* stack, uint64_t, uint64_t) {
  const Check check(FLASHINFER_ATTENTION_NAME);
  const StableIValue* next = stack;
  const BoundTensors tensors = BoundTensors::take(next);
  const BoundResults results = BoundResults::take(next);
  const BoundScales scales = BoundScales::take(next);
  const BoundCall call(check, tensors, scales);
  call.check_results(results.out, results.lse);
  call.run(results.out, results.lse ? floats_of(*results.lse) : nullptr);
}

// bind(), rebind() and unbind() are registered for every device: they may have no tensor argument.
#define FLASHINFER_ATTENTION_BOUND_LIBRARY(ns, key)                                           \
  STABLE_TORCH_LIBRARY_FRAGMENT(ns, m) {                                                      \
    using namespace flashinfer::binding;                                                      \
    m.def(schema_of<ExpectedArguments, BindArguments, VariantArguments>("bind").c_str());     \
    m.def(schema_of<RebindArguments>("rebind").c_str());                                      \
    m.def("unbind(int handle) -> ()");                                                        \
    m.def("stream_of(int handle) -> int");                                                    \
    m.def(schema_of<BoundTensors, BoundScales>("run_bound", "Tensor").c_str());               \
    m.def(schema_of<BoundTensors, BoundScales>("run_bound_lse", "(Tensor, Tensor)").c_str()); \
    m.def(schema_of<BoundTensors, BoundResults, BoundScales>("run_bound_out").c_str());       \
  }                                                                                           \
  STABLE_TORCH_LIBRARY_IMPL(ns, key, m) {                                                     \
    m.impl("run_bound", flashinfer::binding::run_bound<false>);                               \
    m.impl("run_bound_lse", flashinfer::binding::run_bound<true>);                            \
    m.impl("run_bound_out", flashinfer::binding::run_bound_out);                              \
  }                                                                                           \
  STABLE_TORCH_LIBRARY_IMPL(ns, CompositeExplicitAutograd, m) {                               \
    m.impl("bind", flashinfer::binding::bind);                                                \
    m.impl("rebind", flashinfer::binding::rebind);                                            \
    m.impl("unbind", flashinfer::binding::box<flashinfer::binding::unbind>);                  \
    m.impl("stream_of", flashinfer::binding::box<flashinfer::binding::stream_of>);            \
  }

}  // namespace flashinfer::binding
