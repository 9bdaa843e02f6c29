// Operators of the delta rule. The kernels are in delta_rule_cpu.cc and delta_rule_cuda.cu.
#include "delta_rule/inputs.h"

#include <tuple>

namespace flashinfer::binding {
namespace {

// Compute whole sequences. `params` has the options that are not in `args`.
std::tuple<Tensor, Tensor> run_sequences(const DeltaRuleArguments& args, DeltaRuleParams params, const Tensor& q,
                                         const Tensor& v, const OptionalTensor& initial_state, bool final_state) {
  const int64_t num = args.inputs.num_sequences;
  const void* initial = args.state(initial_state, "initial_state");
  const OnDevice where(args.q);
  Tensor o = args.like_v(v), state = args.new_states(final_state ? num : 0, q);
  params.in = args.inputs;
  params.o = View(o, "o").data;
  params.initial_state = initial;
  params.final_state = final_state ? View(state, "final_state").data : nullptr;
  params.num_slots = num;
  params.state_dtype = state_dtype(args.q.dtype);
  params.slot_bytes = args.inputs.num_value_heads * args.inputs.state_size() * size_of(params.state_dtype);
  const Tensor workspace = empty_bytes(delta_rule_chunk_workspace(args.inputs, where), q);
  params.workspace = View(workspace, "workspace").data;
  delta_rule(params, where);
  return {std::move(o), std::move(state)};
}

std::tuple<Tensor, Tensor> delta_rule_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                                               const OptionalTensor& g, const OptionalTensor& gk,
                                               const OptionalTensor& beta, const OptionalTensor& initial_state,
                                               const OptionalTensor& cu_seqlens, double scale,
                                               const OptionalTensor& scale_tensor, bool final_state, bool l2norm,
                                               bool v_first, bool chunked) {
  const Check check("delta_rule");
  const DeltaRuleArguments args(check, q, k, v, g, gk, beta, cu_seqlens, scale, scale_tensor, l2norm, v_first, chunked);
  return run_sequences(args, {}, q, v, initial_state, final_state);
}

// Also stores states within the sequences.
std::tuple<Tensor, Tensor> delta_rule_checkpoints(const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const OptionalTensor& g, const OptionalTensor& gk,
                                                  const OptionalTensor& beta, const OptionalTensor& initial_state,
                                                  const OptionalTensor& cu_seqlens, const Tensor& checkpoints,
                                                  const Tensor& checkpoint_starts, int64_t checkpoint_every,
                                                  double scale, const OptionalTensor& scale_tensor, bool final_state,
                                                  bool l2norm, bool v_first, bool chunked) {
  const Check check("delta_rule_checkpoints");
  // On CUDA only the recurrent kernel stores checkpoints.
  const DeltaRuleArguments args(check, q, k, v, g, gk, beta, cu_seqlens, scale, scale_tensor, l2norm, v_first,
                                chunked && !kOnCuda);
  const View states(checkpoints, "checkpoints"), starts(checkpoint_starts, "checkpoint_starts");
  check.rank(states, 4, 4);
  if (args.q.dtype == DType::kFloat64) {
    check.dtype(states, {DType::kFloat64});
  } else {
    check.floating(states);
  }
  args.state_shape(states, -1);
  check.writable(states);
  for (const View* arg : {&args.q, &args.k, &args.v}) check.no_overlap(states, *arg, false);
  if (initial_state) check.no_overlap(states, View(*initial_state, "initial_state"), false);
  check.shape(starts, {args.inputs.num_sequences});
  check.that(checkpoint_every > 0 && checkpoint_every % 64 == 0, "checkpoint_every",
             "got another number, wanted a positive multiple of 64");
  DeltaRuleParams params{};
  params.checkpoints = states.data;
  params.checkpoint_starts = args.indices(starts);
  params.checkpoint_every = checkpoint_every;
  params.num_checkpoints = states.size(0);
  params.checkpoint_dtype = states.dtype;
  return run_sequences(args, params, q, v, initial_state, final_state);
}

std::tuple<Tensor, Tensor> delta_rule_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                              const OptionalTensor& g, const OptionalTensor& gk,
                                              const OptionalTensor& beta, const OptionalTensor& initial_state,
                                              const OptionalTensor& cu_seqlens, double scale, bool final_state,
                                              bool l2norm, bool v_first, bool chunked) {
  return delta_rule_autograd(q, k, v, g, gk, beta, initial_state, cu_seqlens, scale, {}, final_state, l2norm, v_first,
                             chunked);
}

// Advance each sequence by a few tokens, on a pool of states that is updated in place.
Tensor delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& state, const OptionalTensor& g,
                       const OptionalTensor& gk, const OptionalTensor& beta, const OptionalTensor& a_log,
                       const OptionalTensor& dt_bias, const OptionalTensor& state_indices,
                       const OptionalTensor& output_indices, const OptionalTensor& snapshots, double scale,
                       const OptionalTensor& scale_tensor, double lower_bound, int64_t beta_sigmoid, bool l2norm,
                       bool v_first, bool update_state) {
  const Check check("delta_rule_step");
  const DeltaRuleArguments args(check, q, k, v, g, gk, beta, {}, scale, scale_tensor, l2norm, v_first, false);
  const DeltaRuleInputs& in = args.inputs;
  const View pool(state, "state");
  check.rank(pool, 4, 4);
  if (args.q.dtype == DType::kFloat64) {
    check.dtype(pool, {DType::kFloat64});
  } else {
    check.floating(pool);
  }
  args.slots_shape(pool, state_indices || output_indices ? -1 : in.batch_size);
  DeltaRuleParams params{};
  const auto per_head = [&](const OptionalTensor& tensor, const char* name, bool rows) -> const float* {
    if (!tensor) return nullptr;
    const View arg(*tensor, name);
    check.dtype(arg, {DType::kFloat32});
    if (rows) {
      check.shape(arg, {in.num_value_heads, in.key_dim});
    } else {
      check.shape(arg, {in.num_value_heads});
    }
    check.same_device(arg, args.q);
    check.contiguous(arg);
    return static_cast<const float*>(arg.data);
  };
  params.raw_gk = a_log && gk && !g;
  params.a_log = per_head(a_log, "A_log", false);
  params.dt_bias = per_head(dt_bias, "dt_bias", params.raw_gk);
  params.lower_bound = static_cast<float>(lower_bound);
  check.that(!a_log || g || gk, "g", "got None, wanted the raw gate that A_log is for");
  check.that(lower_bound <= 0, "lower_bound", "got a number above 0, wanted a negative one, or 0 for no bound");
  check.that(lower_bound == 0 || a_log, "A_log", "got None, wanted it for lower_bound");
  check.that(!dt_bias || a_log, "A_log", "got None, wanted it with dt_bias");
  check.that(beta_sigmoid == 0 || beta, "beta", "got None, wanted logits");
  const auto slots = [&](const OptionalTensor& tensor, const char* name) -> Indices {
    if (!tensor) return {};
    const View arg(*tensor, name);
    check.shape(arg, {in.batch_size});
    return args.indices(arg);
  };
  params.slots = slots(state_indices, "state_indices");
  params.output_slots = slots(output_indices, "output_indices");
  if (snapshots) {
    const View arg(*snapshots, "snapshots");
    const int64_t rows = v_first ? in.value_dim : in.key_dim, columns = v_first ? in.key_dim : in.value_dim;
    check.shape(arg, {in.batch_size, -1, in.num_value_heads, rows, columns});
    check.that(arg.size(1) >= in.num_tokens, "snapshots", "got fewer states of a sequence than it has tokens");
    check.same_dtype(arg, pool);
    check.same_device(arg, args.q);
    check.contiguous(arg);
    check.writable(arg);
    check.no_overlap(arg, pool, false);
    params.snapshots = arg.data, params.snapshot_rows = arg.size(1);
  }
  for (const View* arg : {&args.q, &args.k, &args.v}) check.no_overlap(pool, *arg, false);
  const OnDevice where(args.q);
  Tensor o = args.like_v(v);
  params.in = in;
  params.o = View(o, "o").data;
  params.initial_state = pool.data;
  params.final_state = update_state ? pool.data : nullptr;
  params.num_slots = pool.size(0);
  params.slot_bytes = pool.stride(0) * size_of(pool.dtype);
  params.state_dtype = pool.dtype;
  params.beta_sigmoid = check.int32("beta_sigmoid", beta_sigmoid);
  delta_rule(params, where);
  return o;
}

FLASHINFER_LIBRARY(m) {
  m.impl("delta_rule", box<delta_rule_forward>);
  m.impl("delta_rule_autograd", box<delta_rule_autograd>);
  m.impl("delta_rule_checkpoints", box<delta_rule_checkpoints>);
  m.impl("delta_rule_step", box<delta_rule_step>);
}

}  // namespace
}  // namespace flashinfer::binding
