"""FlashInfer's names for the gated delta rule: conventions, and errors for flash-linear-attention's."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import delta_rule
from flashinfer.errors import GradientError, UnsupportedError

from .oracle import delta_rule as oracle
from .oracle import error, inputs


def packed(device: str, lengths: list[int]):
    given = inputs(torch.float32, device, batch=1, tokens=sum(lengths), sequences=len(lengths))
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    mine = {name: one[0] for name, one in given.items() if name != "initial_state"}
    mine |= {"g": mine["g"].exp(), "initial_state": given["initial_state"].mT.contiguous(), "cu_seqlens": offsets}
    return given, mine


def test_prefill(device):
    lengths = [5, 0, 33]
    given, mine = packed(device, lengths)
    want, last = oracle(**{n: one.cpu().double() for n, one in given.items()}, scale=0.3, l2norm=True, lengths=lengths)
    out, state = torch.full_like(mine["v"], float("nan")), torch.full_like(mine["initial_state"], float("nan"))
    options = dict(scale=0.3, use_qk_l2norm_in_kernel=True)
    result = flashinfer.chunk_gated_delta_rule(
        **mine, **options, output=out, output_state=state, output_final_state=True
    )
    assert result[0] is out and result[1] is state
    assert error(out[None], want) < 1e-5 and error(state.mT, last) < 1e-5
    assert flashinfer.chunk_gated_delta_rule(**mine, **options).equal(out)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16, None], ids=str)
def test_prefill_as_vllm_calls_it_allocates_its_state(state_dtype, device):
    lengths = [5, 0, 33]
    given, mine = packed(device, lengths)
    initial = mine.pop("initial_state").to(state_dtype or torch.float32)
    given["initial_state"] = initial.mT if state_dtype else torch.zeros_like(initial.mT)
    want, last = oracle(**{n: one.cpu().double() for n, one in given.items()}, scale=48**-0.5, lengths=lengths)
    out, state = flashinfer.chunk_gated_delta_rule(
        **mine, initial_state=initial if state_dtype else None, output_final_state=True, state_checkpoints=None,
        checkpoint_cu_starts=None, checkpoint_every_n_tokens=0, use_cp="auto", state_indices=None, backend="flashinfer",
        max_seqlen=33,
    )  # fmt: skip
    assert error(out[None], want) < 1e-5
    assert state.dtype == (state_dtype or torch.float32) and state.shape == initial.shape
    assert error(state.mT, last) < {torch.bfloat16: 3e-3, torch.float16: 4e-4}.get(state_dtype, 1e-5)
    again = torch.full_like(initial, 77.0)
    offsets = torch.zeros(4, 2, dtype=torch.int16, device=device)
    offsets[:, 1] = mine["cu_seqlens"]
    strided = mine | {"cu_seqlens": offsets[:, 1], "initial_state": initial if state_dtype else None}
    flashinfer.chunk_gated_delta_rule(**strided, output_final_state=True, output_state=again)
    assert again.equal(state)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("every", [64, 128])
def test_checkpoints_and_pools(every, state_dtype, device):
    """Sequences of drawn lengths, some shorter than a checkpoint or of whole ones, on a pool with gaps."""
    lengths = [every, 0, int(torch.randint(1, 64, ())), 3 * every + int(torch.randint(1, 64, ())), 2 * every]
    given, mine = packed(device, lengths)
    slots = torch.randperm(9)[: len(lengths)].to(device, torch.int32)
    pool = torch.full((9, 2, *mine["initial_state"].shape[1:]), 77.0, dtype=state_dtype, device=device)[:, 1]
    pool[slots.long()] = mine.pop("initial_state").to(state_dtype)
    before = pool._base.clone()
    given["initial_state"] = pool[slots.long()].mT
    exact = {name: one.cpu().double() for name, one in given.items()}
    want, last = oracle(**exact, scale=48**-0.5, lengths=lengths)
    rows = [2, 4, 4, 5, 9, 11]  # of each sequence: a row between those of two sequences stays as it was
    kept = torch.full((13, *pool.shape[1:]), 77.0, dtype=state_dtype, device=device)
    call = mine | dict(initial_state=pool, output_state=pool, state_indices=slots, state_checkpoints=kept)
    call |= dict(checkpoint_cu_starts=torch.tensor(rows, device=device), checkpoint_every_n_tokens=every)
    out, state = flashinfer.chunk_gated_delta_rule(**call, output_final_state=True, use_cp="auto")
    bound = {torch.bfloat16: 3e-3, torch.float16: 4e-4}.get(state_dtype, 1e-5)
    assert state is pool and error(out[None], want) < 1e-5
    assert error(pool[slots.long()].mT, last) < bound
    named = torch.zeros(9, dtype=torch.bool)
    named[slots.long().cpu()] = True
    assert pool[~named.to(device)].eq(77).all() and pool._base[:, 0].equal(before[:, 0])
    written, start = set(), 0
    for n, length in enumerate(lengths):
        for i in range(length // every):
            part = {
                name: one[:, start : start + (i + 1) * every] for name, one in exact.items() if name != "initial_state"
            }
            _, then = oracle(**part, initial_state=exact["initial_state"][n : n + 1], scale=48**-0.5)
            assert error(kept[rows[n] + i][None].mT, then) < bound
            written.add(rows[n] + i)
        start += length
    assert kept[[i for i in range(13) if i not in written]].eq(77).all()
    assert kept[rows[0]].equal(pool[slots[0].long()]) and kept[rows[4] + 1].equal(pool[slots[4].long()])
    # Rows outside the checkpoints are not written.
    less = torch.full_like(kept, 77.0)
    call |= dict(checkpoint_cu_starts=torch.tensor([-1, 0, 0, 12, 13, 14], dtype=torch.int32, device=device))
    pool._base.copy_(before)
    flashinfer.chunk_gated_delta_rule(**(call | dict(state_checkpoints=less)))
    assert less[:12].eq(77).all() and less[12].equal(kept[rows[3]])


def test_checkpoints_have_no_gradient(device):
    _, mine = packed(device, [70])
    kept = torch.zeros_like(mine["initial_state"])
    starts = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(GradientError, match="^chunk_gated_delta_rule: has no gradient"):
        flashinfer.chunk_gated_delta_rule(
            **(mine | dict(v=mine["v"].requires_grad_())), state_checkpoints=kept, checkpoint_cu_starts=starts,
            checkpoint_every_n_tokens=64,
        )  # fmt: skip
    assert not kept.any()


def test_more_heads_of_queries_than_of_values(device):
    _, mine = packed(device, [7])
    mine["q"] = torch.randn(7, 12, 48, device=device)
    mine["g"], mine["beta"] = (one.repeat_interleave(2, 1) for one in (mine["g"], mine["beta"]))
    mine["initial_state"] = mine["initial_state"].repeat_interleave(2, 1)
    got = flashinfer.chunk_gated_delta_rule(**mine)
    spread = mine | {n: mine[n].repeat_interleave(12 // mine[n].shape[1], 1) for n in "kv"}
    assert got.shape == (7, 12, 80) and got.equal(flashinfer.chunk_gated_delta_rule(**spread))


def test_prefill_refuses(device):
    _, mine = packed(device, [5])
    for change, text in (
        (dict(q=mine["q"][None]), "q: got 4 dimensions, wanted 3, or four in flashinfer.delta_rule"),
        (dict(cu_seqlens=None), "cu_seqlens: got None"),
        (dict(g=mine["g"][None]), "g: got 3 dimensions, wanted 2, or three in flashinfer.delta_rule"),
        (
            dict(checkpoint_every_n_tokens=32),
            "checkpoint_every_n_tokens: got 32, wanted 0 or a positive multiple of 64",
        ),
        (dict(checkpoint_every_n_tokens=-64), "checkpoint_every_n_tokens: got -64"),
        (dict(checkpoint_every_n_tokens=64), "state_checkpoints: got NoneType, wanted a tensor for every 64 tokens"),
        (dict(state_checkpoints=mine["v"]), "state_checkpoints: got Tensor, wanted None"),
        (dict(checkpoint_cu_starts=mine["v"]), "checkpoint_cu_starts: got Tensor, wanted None"),
        (dict(use_cp="always"), "use_cp: got 'always', wanted 'auto', True or False"),
        (dict(backend="cutlass"), "backend: got 'cutlass'"),
        (dict(v=mine["v"][:, :5]), "q: got 2 heads|k: got 2 heads"),
        (dict(g=mine["g"][None]), "g: got 3 dimensions, wanted 2"),
        (dict(output=mine["v"][:2]), "output: got shape"),
        (dict(output=mine["v"].to("meta")), "output: got a tensor on meta"),
        (
            dict(output_state=mine["initial_state"].to("meta"), output_final_state=True),
            "output_state: got a tensor on meta",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            flashinfer.chunk_gated_delta_rule(**(mine | change))
    out, state = torch.full_like(mine["v"], 77.0), torch.full_like(mine["initial_state"], 77)
    for change, text in (
        (dict(g=1.0), "g: got float, wanted Tensor"),
        (dict(beta=1.0), "beta: got float, wanted Tensor"),
        (dict(output=out.half()), "output: got torch.float16, wanted torch.float32"),
        (dict(output_state=state.int()), "output_state: got torch.int32, wanted torch.float32, torch.float16"),
    ):
        with pytest.raises(TypeError, match=f"^chunk_gated_delta_rule: {text}"):
            flashinfer.chunk_gated_delta_rule(
                **(mine | dict(output=out, output_state=state, output_final_state=True) | change)
            )
    assert bool((out == 77).all() and (state == 77).all())
    starts = torch.zeros(2, dtype=torch.int32, device=device)
    kept, checkpoints = state.clone(), dict(checkpoint_every_n_tokens=64, checkpoint_cu_starts=starts)
    checkpoints["state_checkpoints"] = kept
    rows, slots = torch.zeros(1, dtype=torch.int32, device=device), dict(output_state=state)
    for kind, change, text in (
        (UnsupportedError, dict(use_cp=True), "use_cp: has no kernel"),
        (TypeError, checkpoints | dict(state_checkpoints=kept.half()), "state_checkpoints: got torch.float16"),
        (ValueError, checkpoints | dict(state_checkpoints=kept[0]), "state_checkpoints: got 3 dimensions"),
        (ValueError, checkpoints | dict(state_checkpoints=kept[:, :2]), "state_checkpoints: got shape"),
        (
            ValueError,
            checkpoints | dict(state_checkpoints=torch.stack([kept, kept], 1)[:, 0].expand(2, -1, -1, -1)),
            "state_checkpoints: got strides",
        ),
        (ValueError, checkpoints | dict(state_checkpoints=kept.to("meta")), "state_checkpoints: got a tensor on meta"),
        (TypeError, checkpoints | dict(checkpoint_cu_starts=starts.float()), "checkpoint_cu_starts: got torch.float32"),
        (ValueError, checkpoints | dict(checkpoint_cu_starts=starts[:1]), "checkpoint_cu_starts: got shape"),
        (ValueError, checkpoints | dict(output=out[:2]), "output: got shape"),
        (ValueError, dict(state_indices=rows), "output_state: got None, wanted a pool"),
        (ValueError, slots | dict(state_indices=starts), "state_indices: got shape"),
        (TypeError, slots | dict(state_indices=rows.float()), "state_indices: got torch.float32"),
        (ValueError, slots | dict(state_indices=rows, initial_state=kept[:, :2]), "initial_state: got shape"),
    ):
        with pytest.raises(kind, match=f"^chunk_gated_delta_rule: {text}"):
            flashinfer.chunk_gated_delta_rule(**(mine | dict(output=out) | change))
    if device == "cpu":
        for row in (-1, 1):
            with pytest.raises(ValueError, match="state_indices: got a row outside the pool, wanted rows from 0 to 0"):
                flashinfer.chunk_gated_delta_rule(**(mine | slots), output=out, state_indices=rows + row)
        two = mine | dict(cu_seqlens=torch.tensor([0, 2, 5]), initial_state=torch.cat([kept, kept]))
        with pytest.raises(ValueError, match="state_indices: got a row twice"):
            flashinfer.chunk_gated_delta_rule(
                **two, output=out, output_state=torch.cat([kept, kept]), state_indices=torch.tensor([1, 1])
            )
    assert bool((out == 77).all() and (state == 77).all() and (kept == 77).all())
    if device == "cpu":
        with pytest.raises(
            ValueError, match="g: got numbers outside .*flashinfer.delta_rule.chunk_gated_delta_rule takes"
        ):
            flashinfer.chunk_gated_delta_rule(**(mine | {"g": mine["g"].log() - 1}))


def test_decode(device):
    given = inputs(torch.float32, device, batch=3, tokens=1)
    args = {n: given[n] for n in "qkv"}
    gates = dict(
        A_log=torch.randn(6, device=device) - 3, dt_bias=torch.randn(6, device=device),
        a=torch.randn(3, 1, 6, device=device), b=torch.randn(3, 1, 6, device=device),
    )  # fmt: skip
    g = -gates["A_log"].exp() * torch.nn.functional.softplus(gates["a"] + gates["dt_bias"])
    plain = {n: one.cpu().double() for n, one in (args | {"g": g, "beta": gates["b"].sigmoid()}).items()}
    states = given["initial_state"]
    want, last = oracle(**plain, initial_state=states.cpu().double(), scale=48**-0.5, l2norm=True)
    k_first = states.clone()
    o, state = flashinfer.gated_delta_rule_decode(**args, **gates, state=k_first)
    assert state is k_first and error(o, want) < 1e-5 and error(k_first, last) < 1e-5
    pool = torch.randn(7, 6, 80, 48, device=device)
    slots = torch.tensor([5, 0, 2], device=device)
    pool[slots] = states.mT
    o, state = flashinfer.gated_delta_rule_decode_pretranspose(
        **args, **gates, state=None, initial_state=pool, initial_state_indices=slots
    )
    assert state is pool and error(o, want) < 1e-5 and error(pool[slots].mT, last) < 1e-5
    with pytest.raises(ValueError, match="initial_state: got both"):
        flashinfer.gated_delta_rule_decode_pretranspose(**args, **gates, state=pool, initial_state=pool)
    with pytest.raises(
        ValueError, match="pretranspose: initial_state_indices: got None for a pool of 7, wanted slots of 3"
    ):
        flashinfer.gated_delta_rule_decode_pretranspose(**args, **gates, state=None, initial_state=pool)
    with pytest.raises(ValueError, match="backend: got 'x'"):
        flashinfer.gated_delta_rule_decode(**args, **gates, state=k_first, backend="x")


def test_several_tokens(device):
    given = inputs(torch.float32, device, batch=3, tokens=4)
    args = {n: given[n] for n in "qkv"}
    gates = dict(
        A_log=torch.randn(6, device=device) - 3, dt_bias=torch.randn(6, device=device),
        a=torch.randn(3, 4, 6, device=device), b=torch.randn(3, 4, 6, device=device),
    )  # fmt: skip
    g = -gates["A_log"].exp() * torch.nn.functional.softplus(gates["a"] + gates["dt_bias"])
    plain = {n: one.cpu().double() for n, one in (args | {"g": g, "beta": gates["b"].sigmoid()}).items()}
    states = given["initial_state"]
    steps = [
        oracle(
            **{n: one[:, :t] for n, one in plain.items()}, initial_state=states.cpu().double(), scale=0.3, l2norm=True
        )
        for t in range(1, 5)
    ]
    pool, slots = torch.randn(20, 6, 80, 48, device=device), torch.tensor([5, 0, 2], device=device)
    pool[slots] = states.mT
    before = pool.clone()
    call = args | gates | dict(initial_state_indices=slots, scale=0.3)
    buffer = torch.full((4, 5, 6, 80, 48), float("nan"), device=device)
    with pytest.warns(DeprecationWarning, match="disable_state_update: got None"):
        o, same = flashinfer.gated_delta_rule_mtp(
            **call, initial_state=pool, intermediate_states_buffer=buffer[:3].contiguous()
        )
    assert same is pool and pool.equal(before) and error(o, steps[-1][0]) < 1e-5
    flashinfer.gated_delta_rule_mtp(
        **call, initial_state=pool, intermediate_states_buffer=buffer, disable_state_update=False
    )
    for t, (_, state) in enumerate(steps):
        assert error(buffer[:3, t].mT, state) < 1e-5
    assert error(pool[slots].mT, steps[-1][1]) < 1e-5
    assert buffer[3].isnan().all() and buffer[:, 4].isnan().all()
    # The same with a slot for each token. A sequence without a slot is not written.
    pool.copy_(before)
    call["initial_state_indices"] = torch.tensor([5, -1, 2], device=device)
    each = torch.arange(8, 20, device=device).view(3, 4)
    out = torch.full_like(args["v"], float("nan"))
    o, _ = flashinfer.gated_delta_rule_mtp(
        **call, initial_state=pool, ssm_state_indices=each, disable_state_update=True, output=out
    )
    assert o is out and not o[1].any() and pool[:8].equal(before[:8]) and pool[each[1]].equal(before[each[1]])
    for row in (0, 2):
        assert error(o[row : row + 1], steps[-1][0][row : row + 1]) < 1e-5
        for t, (_, state) in enumerate(steps):
            assert error(pool[each[row, t]][None].mT, state[row : row + 1]) < 1e-5
    # Other integers, with strides.
    again, wide = before.clone(), torch.zeros(3, 4, 2, dtype=torch.int16, device=device)
    wide[..., 1] = each
    same, _ = flashinfer.gated_delta_rule_mtp(
        **(call | dict(initial_state_indices=call["initial_state_indices"].to(torch.int8))), initial_state=again,
        ssm_state_indices=wide[..., 1], disable_state_update=True,
    )  # fmt: skip
    assert same.equal(o) and again.equal(pool)
    # After an invalid slot a sequence has no state. States of other sequences do not change.
    pool.copy_(before)
    call["initial_state_indices"], each[2, 1] = torch.tensor([5, 20, 2], device=device), 20
    o, _ = flashinfer.gated_delta_rule_mtp(
        **call, initial_state=pool, ssm_state_indices=each, disable_state_update=True
    )
    assert o[0].equal(out[0]) and not o[1].any() and o[2, :2].equal(out[2, :2]) and not o[2, 2:].any()
    assert pool[each[1]].equal(before[each[1]]) and pool[[18, 19]].equal(before[[18, 19]])


def test_several_tokens_refuse(device):
    given = inputs(torch.float32, device, batch=2, tokens=3)
    pool, slots = given["initial_state"].mT.contiguous(), torch.tensor([0, 1], device=device)
    call = {n: given[n] for n in "qkv"} | dict(initial_state=pool, initial_state_indices=slots, a=given["g"])
    call |= dict(b=given["beta"], A_log=given["g"][0, 0], dt_bias=given["g"][0, 0], disable_state_update=True)
    each = torch.arange(6, device=device).view(2, 3)
    for change, text in (
        (dict(ssm_state_indices=each[:, :2]), "ssm_state_indices: got"),
        (dict(ssm_state_indices=each, disable_state_update=False), "disable_state_update: got False"),
        (dict(ssm_state_indices=each, intermediate_states_buffer=pool), "ssm_state_indices: got both"),
        (dict(ssm_state_indices=each, output=given["v"][:, :1]), "output: got"),
        (dict(ssm_state_indices=each, output=given["v"].to("meta")), "output: got a tensor on meta"),
        (dict(ssm_state_indices=each, initial_state_indices=slots[:1]), "initial_state_indices: got shape"),
        (dict(initial_state_indices=None, initial_state=pool[:1]), "initial_state_indices: got None for a pool of 1"),
        (dict(intermediate_states_buffer=pool[:, None]), "intermediate_states_buffer: got"),
        (dict(backend="x"), "backend: got 'x'"),
    ):
        with pytest.raises(ValueError, match=f"^gated_delta_rule_mtp: {text}"):
            flashinfer.gated_delta_rule_mtp(**(call | change))
    before = pool.clone()
    for change, text in (
        (dict(ssm_state_indices=each.tolist()), "ssm_state_indices: got list, wanted Tensor"),
        (dict(ssm_state_indices=each.float()), "ssm_state_indices: got torch.float32"),
        (dict(ssm_state_indices=each, initial_state_indices=None), "initial_state_indices: got NoneType"),
        (dict(ssm_state_indices=each, output=given["v"].half()), "output: got torch.float16"),
        (dict(initial_state=None), "initial_state: got NoneType"),
    ):
        with pytest.raises(TypeError, match=f"^gated_delta_rule_mtp: {text}"):
            flashinfer.gated_delta_rule_mtp(**(call | change))
    assert pool.equal(before)


def test_no_name_is_in_two_modules():
    assert flashinfer.chunk_gated_delta_rule is not delta_rule.chunk_gated_delta_rule
    assert not hasattr(flashinfer, "fused_recurrent_delta_rule")


@pytest.mark.parametrize(
    "name", ["gated_delta_rule_decode", "gated_delta_rule_decode_pretranspose", "gated_delta_rule_mtp", "recurrent_kda"]
)
def test_packed_calls_of_steps_name_the_other_function(name, device):
    _, mine = packed(device, [5])
    call = dict(q=mine["q"], k=mine["k"], v=mine["v"])
    if name == "recurrent_kda":
        call |= dict(g=mine["g"], beta=mine["beta"])
    else:
        call |= dict(A_log=mine["g"][0], a=mine["g"], dt_bias=mine["g"][0], b=mine["beta"])
        pool = "initial_state" if name == "gated_delta_rule_mtp" else "state"
        call[pool] = mine["initial_state"]
        if name == "gated_delta_rule_mtp":
            call |= dict(initial_state_indices=None, disable_state_update=True)
    with pytest.raises(ValueError, match=f"^{name}: q: got 3 dimensions, wanted 4, or three in flashinfer.chunk_gated"):
        getattr(flashinfer, name)(**call)
