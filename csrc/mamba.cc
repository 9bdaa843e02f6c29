// Operators of Mamba. The kernels are in mamba_cpu.cc and mamba_cuda.cu.
#include "binding/binding.h"

#include <flashinfer/common/mamba.h>

#include <optional>
#include <utility>

namespace flashinfer::binding {
namespace {

using OptionalTensor = std::optional<Tensor>;

// Arguments of a step, checked against x [B, T, H, P] and the pool [slots, H, P, N].
struct StateUpdateArguments {
  const Check& check;
  View x, state;
  StateUpdateParams params{};

  StateUpdateArguments(const Check& check_, const Tensor& x_, const Tensor& state_)
      : check(check_), x(x_, "x"), state(state_, "state") {
    check.rank(x, 4, 4);
    check.floating(x);
    check.last_contiguous(x);
    check.dtype(state, {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt16});
    check.shape(state, {-1, x.size(2), x.size(3), -1});
    check.same_device(state, x);
    check.writable(state);
    int64_t wanted = 1;
    for (int64_t dim = 3; dim > 0; wanted *= state.size(dim), --dim)
      if (state.numel > 0 && state.size(dim) > 1 && state.stride(dim) != wanted)
        check.fail(state, "is not contiguous within a slot");
    if (state.size(3) < 1 || state.size(3) > kMaxStateSize)
      check.fail(state, "got " + std::to_string(state.size(3)) + " elements in a row, wanted 1 to 256");
    params.batch_size = x.size(0);
    params.num_tokens = x.size(1);
    params.num_heads = x.size(2);
    params.dim = x.size(3), params.state_size = state.size(3);
    params.state = state.data;
    params.state_dtype = state.dtype;
    params.dtype = x.dtype;
    params.num_slots = state.size(0), params.slot_stride = state.stride(0);
    params.x = tokens(x);
    params.num_sequences = params.batch_size;
  }

  TokenTensor tokens(const View& arg) const {
    check.same_dtype(arg, x);
    check.same_device(arg, x);
    check.last_contiguous(arg);
    check.aligned(arg);
    return {arg.data, arg.stride(0), arg.stride(1), arg.stride(2)};
  }
  TokenTensor like_x(const View& arg) const {
    check.same_shape(arg, x);
    return tokens(arg);
  }
  // Check B or C.
  TokenTensor of_groups(const View& arg) const {
    check.shape(arg, {x.size(0), x.size(1), -1, params.state_size});
    if (arg.size(2) < 1 || x.size(2) % arg.size(2) != 0)
      check.fail(arg, "got " + std::to_string(arg.size(2)) + " groups, wanted a divisor of x's " +
                          std::to_string(x.size(2)) + " heads");
    return tokens(arg);
  }
  StridedNumbers numbers(const View& arg) const {
    check.floating(arg);
    check.same_device(arg, x);
    check.aligned(arg);
    StridedNumbers result{arg.data, arg.dtype, {}};
    for (int64_t i = 0; i < arg.ndim; ++i) result.strides[i] = arg.size(i) > 1 ? arg.stride(i) : 0;
    return result;
  }
  StridedNumbers per_head(const OptionalTensor& tensor, const char* name) const {
    if (!tensor) return {};
    const View arg(*tensor, name);
    check.shape(arg, {x.size(2), x.size(3)});
    return numbers(arg);
  }
  // Check integers [rows] or [rows, columns]. -1: any number of rows.
  IndexTable table(const OptionalTensor& tensor, const char* name, int64_t rows, bool columns) const {
    if (!tensor) return {};
    const View arg(*tensor, name);
    check.rank(arg, 1, columns ? 2 : 1);
    check.dtype(arg, {DType::kInt32, DType::kInt64});
    check.same_device(arg, x);
    check.last_contiguous(arg);
    if (rows >= 0 && arg.size(0) < rows)
      check.fail(arg, "got " + std::to_string(arg.size(0)) + " rows, wanted " + std::to_string(rows) + " at least");
    if (arg.ndim == 2 && arg.size(1) < 1) check.fail(arg, "got no columns, wanted one at least");
    if (arg.ndim == 2) return {arg.data, arg.dtype == DType::kInt64, arg.stride(0), arg.size(1)};
    return {arg.data, arg.dtype == DType::kInt64, arg.size(0) > 1 ? arg.stride(0) : 1, 1};
  }

  // Check scales [slots, H, P] of the pool, or [buffers, steps, H, P] of the history. Only int16 has them.
  StateScales scales(const OptionalTensor& tensor, const char* name, bool wanted,
                     std::initializer_list<int64_t> shape) const {
    const bool scaled = state.dtype == DType::kInt16;
    check.that(!tensor || scaled, name, "got scales, wanted None for states that are not int16");
    check.that(!tensor || wanted, name, "got scales, wanted them with intermediate_states_buffer");
    check.that(tensor || !scaled || !wanted, name, "got None, wanted scales for states in int16");
    if (!tensor) return {};
    const View arg(*tensor, name);
    check.dtype(arg, {DType::kFloat32});
    check.shape(arg, shape);
    check.same_device(arg, x);
    check.writable(arg);
    check.no_overlap(arg, state, false);
    if (arg.ndim == 3) return {static_cast<float*>(arg.data), arg.stride(0), arg.stride(1), arg.stride(2)};
    check.contiguous(arg);
    return {static_cast<float*>(arg.data), arg.size(3), 0, 1};
  }

  void take_offsets(const OptionalTensor& tensor) {
    if (!tensor) return;
    const View arg(*tensor, "cu_seqlens");
    params.offsets = table(tensor, "cu_seqlens", 1, false);
    if (x.size(0) != 1)
      check.fail(x, "got a batch of " + std::to_string(x.size(0)) + ", wanted one dimension less with cu_seqlens");
    params.num_sequences = arg.size(0) - 1;
    if (params.num_sequences == 0 && params.num_tokens > 0)
      check.fail(arg, "got one element, wanted at least two with " + std::to_string(params.num_tokens) + " tokens");
    if (kOnCuda) return;  // kernels clamp the values instead
    for (int64_t n = 0; n <= params.num_sequences; ++n) {
      const int64_t got = params.offsets.at(n, 0), least = n ? params.offsets.at(n - 1, 0) : 0;
      const bool last = n == params.num_sequences;
      if (got < least || (n == 0 && got != 0) || (last && got != params.num_tokens))
        check.fail(arg, "got " + std::to_string(got) + " at " + std::to_string(n) + ", wanted offsets from 0 to " +
                            std::to_string(params.num_tokens) + " that do not decrease");
    }
  }

  void take_history(const OptionalTensor& tensor, const OptionalTensor& indices) {
    params.history_indices = table(indices, "intermediate_state_indices", params.num_sequences, false);
    check.that(!indices || tensor, "intermediate_states_buffer", "got None, wanted it with its indices");
    if (!tensor) return;
    const View arg(*tensor, "intermediate_states_buffer");
    check.shape(arg, {-1, -1, x.size(2), x.size(3), params.state_size});
    check.same_dtype(arg, state);
    check.same_device(arg, x);
    check.contiguous(arg);
    check.aligned(arg);
    check.no_overlap(arg, state, false);
    params.history = arg.data;
    params.history_slots = arg.size(0);
    params.history_steps = arg.size(1);
  }
};

void update(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c,
            const OptionalTensor& d, const OptionalTensor& z, const OptionalTensor& dt_bias, bool dt_softplus,
            const OptionalTensor& state_batch_indices, const OptionalTensor& dst_state_batch_indices,
            int64_t pad_slot_id, const Tensor& out, bool update_state, const OptionalTensor& intermediate_states_buffer,
            const OptionalTensor& intermediate_state_indices, const OptionalTensor& rand_seed, int64_t philox_rounds,
            const OptionalTensor& cu_seqlens, const OptionalTensor& num_accepted_tokens,
            const OptionalTensor& state_scale, const OptionalTensor& intermediate_state_scales) {
  const Check check("selective_state_update");
  StateUpdateArguments args(check, x, state);
  StateUpdateParams& p = args.params;
  const View dt_view(dt, "dt"), a_view(a, "A"), b_view(b, "B"), c_view(c, "C"), out_view(out, "out");
  check.same_shape(dt_view, args.x);
  p.dt = args.numbers(dt_view);
  check.shape(a_view, {args.x.size(2), args.x.size(3), p.state_size});
  p.a = args.numbers(a_view);
  p.b = args.of_groups(b_view), p.c = args.of_groups(c_view);
  p.num_groups = b_view.size(2);
  check.same_shape(c_view, b_view);
  p.d = args.per_head(d, "D"), p.bias = args.per_head(dt_bias, "dt_bias");
  if (z) p.z = args.like_x(View(*z, "z"));
  p.softplus = dt_softplus;
  p.update = update_state;
  p.pad_slot = pad_slot_id;
  args.take_offsets(cu_seqlens);
  const int64_t sequences = p.num_sequences;
  if (!state_batch_indices && args.state.size(0) < sequences)
    check.fail(args.state, "got " + std::to_string(args.state.size(0)) + " slots, wanted " + std::to_string(sequences) +
                               " without state_batch_indices");
  p.slots = args.table(state_batch_indices, "state_batch_indices", sequences, true);
  p.output_slots = args.table(dst_state_batch_indices, "dst_state_batch_indices", sequences, true);
  p.accepted = args.table(num_accepted_tokens, "num_accepted_tokens", sequences, false);
  check.that(!num_accepted_tokens || state_batch_indices, "state_batch_indices",
             "got None, wanted slots of each token with num_accepted_tokens");
  // FlashInfer raises ValueError for these mixtures. A call that passes here must not fail there.
  check.that(!d || View(*d, "D").dtype == dt_view.dtype, "D", "got another dtype, wanted dt's");
  check.that(!p.slots.data || !intermediate_state_indices ||
                 View(*intermediate_state_indices, "intermediate_state_indices").dtype ==
                     View(*state_batch_indices, "state_batch_indices").dtype,
             "intermediate_state_indices", "got another dtype, wanted that of state_batch_indices");
  args.take_history(intermediate_states_buffer, intermediate_state_indices);
  p.scales = args.scales(state_scale, "state_scale", true, {args.state.size(0), p.num_heads, p.dim});
  p.history_scales = args.scales(intermediate_state_scales, "intermediate_state_scales", p.history != nullptr,
                                 {p.history_slots, p.history_steps, p.num_heads, p.dim});
  if (rand_seed) {
    const View seed(*rand_seed, "rand_seed");
    check.dtype(seed, {DType::kInt64});
    check.same_device(seed, args.x);
    if (seed.numel != 1) check.fail(seed, "got " + std::to_string(seed.numel) + " elements, wanted 1");
    check.that(args.state.dtype != DType::kFloat32 && args.state.dtype != DType::kInt16, "rand_seed",
               "got a seed, wanted None for states in float32 or int16");
    p.seed = static_cast<const int64_t*>(seed.data);
  }
  if (philox_rounds < 1 || philox_rounds > 10)
    check.fail("philox_rounds", "got " + std::to_string(philox_rounds) + ", wanted 1 to 10");
  p.rounds = static_cast<int>(philox_rounds);
  p.out = args.like_x(out_view);
  check.writable(out_view);
  check.no_overlap(out_view, args.x, false);
  for (const View* arg : {&std::as_const(args.state), &dt_view, &a_view, &b_view, &c_view})
    check.no_overlap(out_view, *arg, false);
  if (z) check.no_overlap(out_view, View(*z, "z"), false);
  for (const View* arg : {&std::as_const(args.x), &dt_view, &b_view, &c_view})
    check.no_overlap(args.state, *arg, false);
  if (args.x.numel == 0) return;
  const OnDevice where(args.x);
  selective_state_update(p, where);
}

FLASHINFER_LIBRARY(m) { m.impl("selective_state_update", box<update>); }

}  // namespace
}  // namespace flashinfer::binding
