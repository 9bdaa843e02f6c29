// The delta rule over sequences, and its step with states in slots and gates of raw numbers.
#include <flashinfer/cpu/delta_rule/forward.h>

#include "delta_oracle.h"

using namespace driver;

// Options of a case: slots of states, and gates that the kernel computes.
struct Besides {
  std::vector<int64_t> slots, output_slots;  // empty: none are given
  bool initial, in_place, snapshots;
  int sigmoid;                 // 0: gates are given as they are
  int64_t checkpoint_every{};  // 0: no checkpoints

  int64_t from(int64_t n) const { return slots.empty() ? n : slots[n]; }
  int64_t to(int64_t n) const { return output_slots.empty() ? from(n) : output_slots[n]; }
};

template <typename T, typename State>
void sequences(const DeltaCase& shape, const Besides& besides) {
  DeltaData<T> data(shape);
  const int64_t heads = shape.value_heads(), size = shape.state_size();
  const int64_t num_slots = besides.slots.empty() ? shape.sequences() : 6, longest = 1 + data.starts.back();
  const auto initial = drawn<State>(num_slots * heads * size, 0.5);
  auto final_state = besides.in_place ? initial : unwritten<State>(initial.size());
  const auto untouched = final_state;
  auto snapshots = unwritten<State>(besides.snapshots ? shape.sequences() * longest * heads * size : 0);
  auto o = unwritten<T>(data.starts.back() * heads * shape.values);
  const auto a_log = drawn<float>(heads, 0.3), dt_bias = drawn<float>(heads);

  DeltaRuleParams p{};
  p.o = o.data(), p.final_state = final_state.data();
  p.initial_state = !besides.initial ? nullptr : besides.in_place ? final_state.data() : initial.data();
  p.snapshots = besides.snapshots ? snapshots.data() : nullptr, p.snapshot_rows = longest;
  std::vector<int32_t> narrow(besides.output_slots.begin(), besides.output_slots.end());
  if (!besides.slots.empty()) p.slots = {besides.slots.data(), true};
  if (!narrow.empty()) p.output_slots = {narrow.data(), false};
  p.num_slots = num_slots, p.state_dtype = kType<State>;
  p.slot_bytes = heads * size * static_cast<int64_t>(sizeof(State));
  std::vector<int64_t> checkpoint_starts(shape.sequences());
  int64_t num_checkpoints = 0;
  for (int64_t n = 0; besides.checkpoint_every && n < shape.sequences(); ++n) {
    checkpoint_starts[n] = num_checkpoints;
    num_checkpoints += (data.starts[n + 1] - data.starts[n]) / besides.checkpoint_every;
  }
  auto checkpoints = unwritten<State>(num_checkpoints * heads * size);
  if (besides.checkpoint_every) {
    p.checkpoints = checkpoints.data(), p.checkpoint_starts = {checkpoint_starts.data(), true};
    p.checkpoint_every = besides.checkpoint_every, p.num_checkpoints = num_checkpoints;
    p.checkpoint_dtype = kType<State>;
  }
  if (besides.sigmoid) {  // raw numbers, also where softplus is a line
    data.g.change([](double x) { return 40 * x + 25; }), data.beta.change([](double x) { return 4 * x - 2; });
    p.a_log = a_log.data(), p.dt_bias = dt_bias.data(), p.beta_sigmoid = besides.sigmoid;
  }
  p.in = data.inputs();
  cpu::delta_rule<T>(p);

  if (besides.sigmoid) {
    for (size_t i = 0; i < data.g.exact.size(); ++i) {
      const int64_t head = static_cast<int64_t>(i) % heads;
      double& g = data.g.exact[i];
      g = -std::exp(value(a_log[head])) * std::log1p(std::exp(g + value(dt_bias[head])));
    }
    for (double& beta : data.beta.exact) beta = besides.sigmoid * sigmoid(beta);
  }
  constexpr double kError = kStateError<T>;
  std::vector<bool> written(num_slots);
  for (int64_t n = 0; n < shape.sequences(); ++n) {
    const int64_t from = besides.from(n), to = besides.to(n);
    const bool runs = from >= 0 && from < num_slots, writes = runs && to >= 0 && to < num_slots;
    if (writes) written[to] = true;
    for (int64_t head = 0; head < heads; ++head) {
      std::vector<double> state(size);
      const auto check_state = [&](const char* what, const std::vector<State>& got, int64_t number) {
        for (int64_t d = 0; d < shape.keys; ++d)
          for (int64_t c = 0; c < shape.values; ++c) {
            const int64_t at = (number * heads + head) * size + shape.in_state(d, c);
            check_rounded(what, at, got[at], state[d * shape.values + c], kError);
          }
      };
      if (runs && besides.initial)
        for (int64_t d = 0; d < shape.keys; ++d)
          for (int64_t c = 0; c < shape.values; ++c)
            state[d * shape.values + c] = value(initial[(from * heads + head) * size + shape.in_state(d, c)]);
      data.recur(n, head, state, [&](int64_t t, const std::vector<double>& out) {
        for (int64_t c = 0; c < shape.values; ++c) {
          const int64_t at = (t * heads + head) * shape.values + c;
          check_rounded("o", at, o[at], runs ? out[c] : 0, kError);
        }
        const int64_t count = t + 1 - data.starts[n];
        if (besides.checkpoint_every && count % besides.checkpoint_every == 0)
          check_state("checkpoints", checkpoints, checkpoint_starts[n] + count / besides.checkpoint_every - 1);
        if (besides.snapshots && runs) check_state("snapshots", snapshots, n * longest + t - data.starts[n]);
      });
      if (writes) check_state("final_state", final_state, to);
    }
  }
  for (int64_t at = 0; at < num_slots * heads * size; ++at)
    if (!written[at / (heads * size)]) check("a slot of nobody", at, value(final_state[at]), value(untouched[at]), 0);
}

void run() {
  const Besides plain{{}, {}, false, false, false, 0}, kept{{}, {}, true, true, true, 0};
  sequences<double, double>({2, 2, 19, 35, {4, 4}, false, true, true, Beta::kColumns, true, false}, kept);
  sequences<float, float>({1, 3, 16, 64, {7, 0, 1, 3}, true, true, false, Beta::kNumber, false, true}, kept);
  sequences<half_t, float>({2, 1, 33, 32, {5, 5, 5}, false, false, true, Beta::kNone, true, true}, plain);
  sequences<bfloat16_t, bfloat16_t>({1, 2, 64, 40, {9, 2}, true, false, false, Beta::kColumns, true, false}, kept);
  sequences<half_t, half_t>({1, 1, 1, 1, {6}, true, true, true, Beta::kNumber, false, false}, kept);
  const Besides checkpointed{{}, {}, true, false, false, 0, 64};
  sequences<float, float>({1, 2, 20, 36, {130, 0, 64, 63}, true, true, false, Beta::kNumber, true, true}, checkpointed);
  sequences<bfloat16_t, float>({1, 1, 16, 8, {70}, false, true, true, Beta::kNumber, false, false}, checkpointed);
  // Steps: a token or a few of each sequence.
  const Besides in_place{{4, -1, 0, 6}, {}, true, true, false, 1};
  const Besides elsewhere{{1, 3, 5, -1}, {2, 0, -1, 3}, true, false, true, 2};
  sequences<float, half_t>({2, 2, 24, 50, {1, 1, 1, 1}, false, true, false, Beta::kNumber, true, true}, in_place);
  sequences<bfloat16_t, float>({2, 2, 40, 33, {1, 3, 2, 1}, true, true, false, Beta::kNumber, true, false}, elsewhere);
  sequences<double, double>({1, 2, 11, 9, {3, 3, 3, 3}, false, true, true, Beta::kNumber, true, true}, elsewhere);
}
