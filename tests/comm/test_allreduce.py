"""All-reduce of ranks that are threads: values, bits, aliases, and arguments that are refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from flashinfer.comm import allreduce as module
from flashinfer.comm.allreduce import allreduce_fusion
from flashinfer.comm.trtllm_ar import AllReduceFusionPattern as Pattern
from flashinfer.comm.trtllm_ar import QuantizationSFLayout
from flashinfer.comm.workspace import EPOCH_WORDS, create_allreduce_fusion_workspace
from flashinfer.errors import GradientError, UnsupportedError

from ..conftest import DTYPES
from .cases import EPS, assert_same_bits, normed, one_rank, summed
from .ranks import Group

SUM, NORM = Pattern.kAllReduce, Pattern.kARResidualRMSNorm
# Sizes that fill vectors, warps and CTAs, that do not, and rows that begin at any element.
SHAPES = [(1, 4096), (3, 7168), (133, 16), (31, 2880), (1, 1), (2, 7), (5, 4097), (132, 8), (2, 16384), (0, 64), (3, 0)]
MORE = [(1000, 4096), (133, 8192), (132, 7168), (1000, 8), (31, 16384), (2, 4097)]


def drawn(size: int, tokens: int, hidden: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return [torch.randn(tokens, hidden, device=device).to(dtype) for _ in range(size)]


def filled(like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, 77)


@pytest.fixture
def shots(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that forces one or two shots for all sizes."""
    return lambda count: monkeypatch.setattr(module, "_SHOTS", count)


def ranks_of(device: str) -> list[int]:
    return [2, 3, 4, 6, 8] if device == "cuda" else [2, 3, random.randint(4, 8)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_and_norm(dtype, device, make_group, shots):
    """Every rank gets the bits of the float32 sum in the order of ranks, with and without the norm, in one or two shots."""
    shapes = SHAPES + MORE if device == "cuda" else SHAPES
    for size in ranks_of(device):
        group = make_group(size, max(t * (h + 8) for t, h in shapes) // 64 + 1, 64, dtype)
        for tokens, hidden in random.sample(shapes, len(shapes) if device == "cuda" else 5):
            for count in (1, 2) if device == "cuda" else random.sample((1, 2), 1):
                shots(count)
                check_shape(group, drawn(size, tokens, hidden, dtype, device))


def test_two_shots_give_the_bits_of_one(device, make_group, shots):
    """In turns on one workspace, in place, with words that are empty to the protocol."""
    dtype, size = torch.bfloat16, 4
    group = make_group(size, 40, 1000, dtype)
    residual, weight = torch.randn(40, 1000, device=device).to(dtype), torch.randn(1000, device=device).to(dtype)
    Tensors = list[torch.Tensor]

    def in_place(given: Tensors, sums: Tensors, norms: Tensors, rank: int, workspace: Any) -> None:
        x = given[rank]
        allreduce_fusion(x, workspace, SUM, output=sums[rank])
        allreduce_fusion(
            x, workspace, NORM, residual_out=x, norm_out=norms[rank], residual_in=residual, rms_gamma=weight
        )

    for _ in range(5):
        parts = drawn(size, 40, 1000, dtype, device)
        parts[0][3], parts[1][5, :9] = float("nan"), float("inf")
        parts[2].view(torch.int16)[7, :40] = -1  # the empty word
        sums, norms = ([[filled(x) for x in parts] for _ in range(2)] for _ in range(2))
        for count in (1, 2):
            shots(count)
            given = [x.clone() for x in parts]

            group.run(partial(in_place, given, sums[count - 1], norms[count - 1]))
        for rank in range(size):
            for one in (sums, norms):
                assert_same_bits(one[1][rank], one[0][0])
                assert torch.equal(one[1][rank].view(torch.int16), one[1][0].view(torch.int16)), "NaN has other bits"
        assert_same_bits(sums[0][0], summed(parts))


def check_shape(group: Group, parts: list[torch.Tensor]) -> None:
    """Check the sum, and the norm with all of its outputs, of one input on each rank."""
    dtype, hidden = parts[0].dtype, parts[0].shape[1]
    residual, weight = torch.randn_like(parts[0]), torch.randn(hidden, device=parts[0].device).to(dtype)
    bias, pdl = random.choice([0.0, 1.0]), random.random() < 0.5
    sums, more, residuals, norms = ([filled(x) for x in parts] for _ in range(4))

    def body(rank: int, workspace: Any) -> None:
        x = parts[rank]
        assert allreduce_fusion(x, workspace, SUM, pdl, output=sums[rank]) is sums[rank]
        result = allreduce_fusion(
            x, workspace, NORM, pdl, output=more[rank], residual_out=residuals[rank], norm_out=norms[rank],
            residual_in=residual, rms_gamma=weight, rms_eps=EPS, weight_bias=bias,
        )  # fmt: skip
        assert result is norms[rank]

    kept = [x.clone() for x in [*parts, residual, weight]]
    group.run(body)
    assert all(torch.equal(x, y) for x, y in zip([*parts, residual, weight], kept, strict=True))
    total = summed(parts)
    for rank in range(group.size):
        assert_same_bits(sums[rank], total)
        assert_same_bits(more[rank], total)
        assert_same_bits(residuals[rank], (total.float() + residual.float()).to(dtype))
        assert_same_bits(norms[rank], norms[0])
    bound = {torch.float32: 2e-6, torch.float16: 1.1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(norms[0].double(), normed(total, residual, weight, bias), rtol=bound, atol=bound / 100)


def quantised(norm: torch.Tensor, quant: int, scale: float, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the FP8 form of a rounded norm, as bytes, and its scales.

    Quotients are those of float64, rounded: torch multiplies by a reciprocal where it divides by a number on a GPU.
    """
    x, scales = norm.float(), None
    if quant == 1:
        x = x * (1 / torch.tensor(scale, device=x.device))
    elif quant == 2:
        scales = (x.abs().amax(-1, keepdim=True).double() / 448).float().clamp(min=2**-9 / 448)
        x = x / scales
    else:
        parts = x.unflatten(-1, (-1, columns))
        mantissas, exponents = torch.frexp((parts.abs().amax(-1).double() / 448).float().clamp(min=1e-10 / 448))
        exponents = exponents - mantissas.eq(0.5).int()
        x = (parts.double() * torch.exp2(-exponents.double())[..., None]).flatten(-2).float()
        padded = torch.nn.functional.pad(exponents + 127, (0, -exponents.shape[-1] % 4))
        scales = padded.to(torch.uint8).contiguous().view(torch.int32)
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scales


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_in_fp8(dtype, device, make_group):
    """The bytes and scales are those of the norm, quantised apart, for every pattern, with scales as numbers and tensors.

    A row of zeros, one of 7 elements, rows beyond the finite range, and groups whose last word has bytes left.
    """
    group = make_group(2, 6, 6400, dtype)
    part = 16 // dtype.itemsize
    for tokens, hidden in ((3, 6400), (5, 640), (1, 128 * 9), (6, 7), (4, 4 * part), (0, 640)):
        columns = random.choice([c for c in (part, 64, 128, 32 * part) if hidden % c == 0] or [0])
        for pattern in (2, 4, 10, 11, 8, 9) if columns else (2, 4, 10, 11):
            check_fp8(group, pattern, drawn(2, tokens, hidden, dtype, device), columns)


def check_fp8(group: Group, pattern: int, parts: list[torch.Tensor], columns: int) -> None:
    """Check all outputs of a pattern with FP8 for one input on each rank."""
    (tokens, hidden), dtype, device = parts[0].shape, parts[0].dtype, parts[0].device
    quant = {2: 1, 4: 1, 10: 2, 11: 2, 8: 3, 9: 3}[pattern]
    residual, weight = torch.randn_like(parts[0]), torch.randn(hidden, device=device).to(dtype)
    if tokens > 2:
        residual[1], parts[0][1], parts[1][1] = 0, 0, 0
        weight[0] = 1000
    scale = random.choice([0.03, 1.0, 2.5])
    factor = random.choice([scale, torch.tensor([scale], device=device)])
    norms, more, residuals = ([filled(x) for x in parts] for _ in range(3))
    fp8 = [torch.full((tokens, hidden), 0x55, dtype=torch.uint8, device=device) for _ in parts]
    scales: list[Any] = [None, None]
    if quant == 2:
        scales = [torch.full((tokens, 1), 7.0, device=device) for _ in parts]
    elif quant == 3:  # columns of a larger tensor, as engines allocate it
        words = -(-hidden // (4 * columns))
        scales = [torch.full((words, tokens + 3), 7, dtype=torch.int32, device=device).T[:tokens] for _ in parts]
    norm: dict[str, Any] = dict(residual_in=residual, rms_gamma=weight, rms_eps=EPS, weight_bias=0.5)

    def body(rank: int, workspace: Any) -> None:
        x = parts[rank]
        allreduce_fusion(x, workspace, NORM, norm_out=norms[rank], residual_out=more[rank], **norm)
        result = allreduce_fusion(
            x, workspace, pattern, residual_out=residuals[rank], norm_out=more[rank],
            quant_out=fp8[rank].view(torch.float8_e4m3fn), scale_out=scales[rank],
            scale_factor=factor if quant == 1 else None, block_quant_group_size=columns or None, **norm,
        )  # fmt: skip
        assert result.data_ptr() == fp8[rank].data_ptr()

    group.run(body)
    want, want_scales = quantised(norms[0], quant, scale, columns)
    total = (summed(parts).float() + residual.float()).to(dtype)
    for rank in range(2):
        assert_same_bits(residuals[rank], total)
        assert_same_bits(more[rank], norms[0] if pattern in (4, 9, 11) else total)  # else not written
        assert torch.equal(fp8[rank], want), (pattern, tokens, hidden, columns)
        if want_scales is not None:
            torch.testing.assert_close(scales[rank], want_scales, rtol=0, atol=0)


def test_outputs_of_quantisation_are_allocated(device):
    x, weight = torch.randn(5, 640, device=device), torch.ones(640, device=device)
    common = dict(residual_in=x.clone(), rms_gamma=weight, rms_eps=EPS)
    norm = allreduce_fusion(x, one_rank(device), NORM, **common)
    for pattern, given in ((2, dict(scale_factor=0.5)), (10, {}), (8, dict(block_quant_group_size=128))):
        got = allreduce_fusion(x, one_rank(device), pattern, **common, **given)
        want, _ = quantised(norm, {2: 1, 10: 2, 8: 3}[pattern], 0.5, 128)
        assert got.dtype == torch.float8_e4m3fn and torch.equal(got.view(torch.uint8), want)


def test_a_row_has_the_same_bits_in_every_batch(device, make_group):
    """Alone, in a batch, and on a group of one rank that normalises the sum."""
    dtype, hidden = torch.bfloat16, 7168
    group = make_group(2, 40, hidden, dtype)
    parts, weight = drawn(2, 40, hidden, dtype, device), torch.randn(hidden, device=device).to(dtype)
    residual = torch.randn_like(parts[0])
    norms = [filled(x) for x in parts]
    alone = [[filled(x[:1]) for _ in range(40)] for x in parts]

    def call(x: torch.Tensor, workspace: Any, out: torch.Tensor, rows: slice) -> None:
        allreduce_fusion(x[rows], workspace, NORM, norm_out=out, residual_in=residual[rows], rms_gamma=weight)

    def body(rank: int, workspace: Any) -> None:
        call(parts[rank], workspace, norms[rank], slice(0, 40))
        for row in range(40):
            call(parts[rank], workspace, alone[rank][row], slice(row, row + 1))

    group.run(body)
    assert_same_bits(torch.cat(alone[1]), norms[0])
    apart = allreduce_fusion(summed(parts), one_rank(device), NORM, residual_in=residual, rms_gamma=weight)
    assert_same_bits(apart, norms[0])


@pytest.mark.parametrize("pattern", [SUM, NORM])
def test_a_call_runs_few_python_functions(pattern, device):
    """Python takes most of the host's time of an eager call, which a launch on a GPU must not wait for."""
    x, residual, out = (torch.randn(2, 64, device=device) for _ in range(3))
    given = dict(output=out) if pattern == SUM else dict(norm_out=out, residual_out=residual, residual_in=residual)
    given |= dict(rms_gamma=x[0]) if pattern == NORM else {}
    workspace, events = one_rank(device), list[tuple[str, str]]()

    def record(frame: Any, event: str, _: Any) -> Any:
        if event in ("call", "exception"):
            events.append((event, frame.f_code.co_name))
        return record

    for _ in range(2):  # the first call may load the module
        events.clear()
        sys.settrace(record)
        try:
            allreduce_fusion(x, workspace, pattern, True, **given)
        finally:
            sys.settrace(None)
    functions = ["allreduce_fusion", "call", "check_tensor", "check_workspace", "is_dynamo_compiling"]
    assert sorted(events) == [("call", name) for name in functions], events


@pytest.mark.parametrize("alias", ["norm in input, residual in place", "residual in input", "norm in residual"])
def test_outputs_may_be_inputs(alias, device, make_group):
    """vLLM writes the norm over the input and the residual in place, or the residual over the input."""
    dtype, tokens, hidden = torch.float16, 37, 520
    group = make_group(3, tokens, hidden, dtype)
    parts, weight = drawn(3, tokens, hidden, dtype, device), torch.randn(hidden, device=device).to(dtype)
    residual = torch.randn_like(parts[0])
    total = summed(parts)
    want = (total.float() + residual.float()).to(dtype)
    residuals, others = [residual.clone() for _ in parts], [filled(x) for x in parts]

    def outputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, r, other = parts[rank], residuals[rank], others[rank]
        return (r, x) if alias.startswith("norm in input") else (x, other) if "in input" in alias else (other, r)

    def body(rank: int, workspace: Any) -> None:
        to, norm = outputs(rank)
        allreduce_fusion(
            parts[rank], workspace, NORM, residual_out=to, norm_out=norm, residual_in=residuals[rank],
            rms_gamma=weight, rms_eps=EPS,
        )  # fmt: skip

    group.run(body)
    for rank in range(3):
        to, norm = outputs(rank)
        assert_same_bits(to, want)
        torch.testing.assert_close(norm.double(), normed(total, residual, weight, 0), rtol=1.1e-3, atol=1e-5)
    parts[:] = drawn(3, tokens, hidden, dtype, device)
    total = summed(parts)
    group.run(lambda rank, workspace: allreduce_fusion(parts[rank], workspace, SUM, output=parts[rank]))
    for x in parts:
        assert_same_bits(x, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_word_is_sent(dtype, device, make_group):
    """Numbers that the protocol might take for empty words: NaN of all bits, infinities and zeros of both signs."""
    group = make_group(2, 4, 64, dtype)
    parts = drawn(2, 4, 64, dtype, device)
    whole = torch.int32 if dtype.itemsize == 4 else torch.int16
    parts[0].view(whole)[0] = -1  # the empty word
    parts[1].view(whole)[1, ::3] = -1
    parts[0][2, :8], parts[1][2, 4:12], parts[0][2, 12] = float("inf"), float("-inf"), float("nan")
    for x in parts:
        x[3] = -0.0
    sums = [filled(x) for x in parts]
    group.run(lambda rank, workspace: allreduce_fusion(parts[rank], workspace, SUM, output=sums[rank]))
    want = summed(parts)
    assert want.isnan().any() and want.isinf().any() and torch.signbit(want[3]).all()
    for x in sums:
        assert_same_bits(x, want)
    assert torch.equal(sums[0].view(whole), sums[1].view(whole)), "NaN has other bits on another rank"


@pytest.mark.parametrize("count_of_shots", [1, 2])
def test_calls_of_random_shapes(count_of_shots, device, make_group, shots):
    """No call waits for the other ranks' last one. Epochs pass the end of their words."""
    shots(count_of_shots)
    dtype, count = torch.bfloat16, 400
    size = 4
    group = make_group(size, 16, 640, dtype)
    for workspace in group.workspaces:
        workspace._state[:EPOCH_WORDS] = -count // 2  # two's complement: wraps in the middle
    shapes = [(random.randint(0, 16), random.randint(1, 80) * 8) for _ in range(count)]
    parts = [drawn(size, tokens, hidden, dtype, device) for tokens, hidden in shapes]
    sums = [[filled(x) for x in one] for one in parts]

    def body(rank: int, workspace: Any) -> None:
        for number, (one, out) in enumerate(zip(parts, sums, strict=True)):
            allreduce_fusion(one[rank], workspace, SUM, output=out[rank])
            group.bound_launches(rank, number)

    group.run(body)
    for one, out in zip(parts, sums, strict=True):
        for x in out:
            assert_same_bits(x, summed(one))
    assert all((workspace._state[:EPOCH_WORDS] == count // 2)[:1].all() for workspace in group.workspaces)


def test_two_groups_at_once(device, make_group):
    """Workspaces of the same ranks, used in turns, do not share words."""
    groups = [make_group(2, 9, 264, torch.float32) for _ in range(2)]
    parts = [drawn(2, 9, 264, torch.float32, device) for _ in range(20)]
    sums = [[filled(x) for x in one] for one in parts]

    def body(rank: int, _: Any) -> None:
        for number, one in enumerate(parts):
            workspace = groups[number % 2].workspaces[rank]
            allreduce_fusion(one[rank], workspace, SUM, output=sums[number][rank])

    groups[0].run(body)
    for one, out in zip(parts, sums, strict=True):
        assert_same_bits(out[1], summed(one))


def test_graphs_replay(device, make_group):
    """Three graphs with other sizes, replayed in turns with eager calls between: the bits of eager calls."""
    if device != "cuda":
        pytest.skip("needs a GPU")
    dtype, shapes = torch.bfloat16, [(1, 4096), (64, 1024), (5, 7168)]
    group = make_group(4, 64, 2048, dtype)
    parts = [drawn(4, *shape, dtype, device) for shape in shapes]
    residuals = [torch.randn_like(one[0]) for one in parts]
    weights = [torch.randn(hidden, device=device).to(dtype) for _, hidden in shapes]
    norms, eager = ([[filled(x) for x in one] for one in parts] for _ in range(2))
    graphs: list[list[Any]] = [[None] * 4 for _ in shapes]

    def call(rank: int, workspace: Any, number: int, out: list[list[torch.Tensor]]) -> None:
        allreduce_fusion(
            parts[number][rank], workspace, NORM, True, norm_out=out[number][rank],
            residual_in=residuals[number], rms_gamma=weights[number],
        )  # fmt: skip

    for number in range(len(shapes)):  # one capture at a time: torch keeps one pool of a capturing thread
        for rank in range(4):
            graphs[number][rank] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[number][rank], stream=group.streams[rank]):
                for _ in range(3):
                    call(rank, group.workspaces[rank], number, norms)
    order = [random.randrange(len(shapes)) for _ in range(1_000)]

    def body(rank: int, workspace: Any) -> None:
        for count, number in enumerate(order):
            graphs[number][rank].replay()
            call(rank, workspace, number, eager)
            group.bound_launches(rank, count)

    group.run(body)
    for number in set(order):
        for rank in range(4):
            assert_same_bits(norms[number][rank], eager[number][0])


def test_ten_thousand_replays(device, make_group):
    """The last replay has the bits of the first, and every call is counted."""
    if device != "cuda":
        pytest.skip("needs a GPU")
    dtype, size = torch.bfloat16, 2
    group = make_group(size, 8, 4096, dtype)
    parts, residual = drawn(size, 8, 4096, dtype, device), torch.randn(8, 4096, device=device).to(dtype)
    weight, outs = torch.randn(4096, device=device).to(dtype), [[filled(x) for x in parts] for _ in range(3)]
    graphs = [torch.cuda.CUDAGraph() for _ in range(size)]
    for rank, (graph, workspace) in enumerate(zip(graphs, group.workspaces, strict=True)):
        with torch.cuda.graph(graph, stream=group.streams[rank]):
            allreduce_fusion(parts[rank], workspace, SUM, True, output=outs[0][rank])
            allreduce_fusion(
                parts[rank], workspace, NORM, True, residual_out=outs[1][rank], norm_out=outs[2][rank],
                residual_in=residual, rms_gamma=weight,
            )  # fmt: skip

    def replay(count: int) -> list[torch.Tensor]:
        def body(rank: int, _: Any) -> None:
            for number in range(count):
                graphs[rank].replay()
                group.bound_launches(rank, number)

        group.run(body)
        return [x.clone() for one in outs for x in one]

    first = replay(1)
    for one in outs:
        for x in one:
            x.fill_(77)
    for got, want in zip(replay(9_999), first, strict=True):
        assert_same_bits(got, want)
    assert_same_bits(first[0], summed(parts))
    assert all((workspace._state[:EPOCH_WORDS] == 20_000).all() for workspace in group.workspaces)


def test_every_eager_call_is_counted(device, make_group):
    """With programmatic launch, a kernel starts while the one before it still counts its call."""
    count = 5_000 if device == "cuda" else 200
    group = make_group(2, 1, 4096, torch.bfloat16)
    parts = drawn(2, 1, 4096, torch.bfloat16, device)
    outs = [filled(x) for x in parts]

    def body(rank: int, workspace: Any) -> None:
        for number in range(count):
            allreduce_fusion(parts[rank], workspace, SUM, True, output=outs[rank])
            group.bound_launches(rank, number)

    group.run(body)
    for out in outs:
        assert_same_bits(out, summed(parts))
    words = EPOCH_WORDS if device == "cuda" else 1
    assert all((workspace._state[:words] == count).all() for workspace in group.workspaces)


def test_a_residual_in_place_call_after_call(device, make_group):
    """Each call reads the residual that the one before wrote, also where two CTAs share a cache line."""
    size, rows, hidden, count = 2, 264, 36, 3000 if device == "cuda" else 50
    group = make_group(size, rows, hidden, torch.float32)
    x, weight = torch.ones(rows, hidden, device=device), torch.ones(hidden, device=device)
    residuals, norms = ([torch.zeros_like(x) for _ in range(size)] for _ in range(2))

    def body(rank: int, workspace: Any) -> None:
        for number in range(count):
            allreduce_fusion(
                x, workspace, NORM, True, residual_in=residuals[rank], residual_out=residuals[rank],
                norm_out=norms[rank], rms_gamma=weight,
            )  # fmt: skip
            group.bound_launches(rank, number)

    group.run(body)
    for residual in residuals:
        assert (residual == size * count).all()


def test_forms_of_engines(device):
    """The keywords of vLLM 0.33.0 and SGLang 0.5.23, with vLLM's aliases."""
    one = create_allreduce_fusion_workspace(
        backend="trtllm", world_size=1, rank=0, max_token_num=8, hidden_dim=64, dtype=torch.bfloat16,
        comm_backend=None, group=None, device=device,
    )  # fmt: skip
    assert one.backend == "trtllm" and getattr(one, "mc_ptr", 0) == 0 and one.metadata["use_fp32_lamport"] is False
    assert one.is_buffer_size_sufficient(1, 8, 64, torch.bfloat16, use_oneshot=True)
    x, residual = (torch.randn(4, 64, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(64, device=device).bfloat16()
    kept, sums_only = x.clone(), dict(pattern=SUM, launch_with_pdl=True, trigger_completion_at_end=False)
    assert torch.equal(allreduce_fusion(input=x, workspace=one, **sums_only), x)
    want = normed(x, residual, weight, 1.0)
    sums = (x.float() + residual.float()).bfloat16()
    allreduce_fusion(
        input=x, workspace=one, pattern=NORM, launch_with_pdl=True, output=None, residual_out=residual, norm_out=x,
        quant_out=None, scale_out=None, residual_in=residual, rms_gamma=weight, rms_eps=EPS, scale_factor=None,
        layout_code=QuantizationSFLayout.SWIZZLED_128x4, use_oneshot=True, fp32_acc=True, weight_bias=1.0,
        trigger_completion_at_end=True,
    )  # fmt: skip
    assert torch.equal(residual, sums)
    torch.testing.assert_close(x.double(), want, rtol=8e-3, atol=8e-5)
    zeros, norm = torch.zeros_like(x), torch.empty_like(x)
    x.copy_(kept)
    allreduce_fusion(
        input=x, workspace=one, pattern=NORM, launch_with_pdl=True, residual_out=x, norm_out=norm, residual_in=zeros,
        rms_gamma=weight, rms_eps=EPS, fp32_acc=True,
    )  # fmt: skip
    assert torch.equal(x, kept)
    torch.testing.assert_close(norm.double(), normed(kept, zeros, weight, 0.0), rtol=8e-3, atol=8e-5)
    one.destroy()


def test_compiled(device, cold_dynamo):
    """One graph, in place: the operator's order and its table reach the kernel."""
    workspace = one_rank(device)
    x, residual, weight = (torch.randn(6, 64, device=device) for _ in range(3))

    def layer(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        norm = allreduce_fusion(
            x, workspace, NORM, residual_in=residual, residual_out=residual, rms_gamma=weight[0], rms_eps=EPS
        )
        return allreduce_fusion(norm * 2, workspace, SUM)

    kept, before = residual.clone(), int(workspace._state[0])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = compiled(x, residual)
    assert_same_bits(residual, x + kept)
    assert_same_bits(got, layer(x, kept))
    assert int(workspace._state[0]) == before + 4


# Arguments


def refused(text: str, kind: type[Exception] = ValueError, **change: Any) -> None:
    device = change.pop("device")
    x = torch.randn(4, 64, device=device)
    arguments: dict[str, Any] = dict(
        input=x, workspace=one_rank(device), pattern=NORM, residual_in=x.clone(), residual_out=filled(x),
        norm_out=filled(x), rms_gamma=x[0].clone(),
    )  # fmt: skip
    arguments |= {name: value(x) if callable(value) else value for name, value in change.items()}
    with pytest.raises(kind, match=f"^allreduce_fusion: {text}"):
        allreduce_fusion(**arguments)
    for name in ("residual_out", "norm_out"):
        if name not in change:
            assert (arguments[name] == 77).all(), "something was written"


def test_invalid_arguments(device):
    one, shared = one_rank(device), torch.ones(4, 64, device=device)
    before = int(one._state[0])
    for text, change in {
        "input: got None": dict(input=None),
        "workspace: got int": dict(workspace=3),
    }.items():
        refused(text, TypeError, device=device, **change)
    for text, change in {
        "input: got 1 dimensions, wanted 2": dict(input=lambda x: x[0]),
        "input: is not contiguous": dict(input=lambda x: x.T),
        "residual_in: got None": dict(residual_in=None),
        "rms_gamma: got None": dict(rms_gamma=None),
        r"rms_gamma: got shape \[63\], wanted \[64\]": dict(rms_gamma=lambda x: x[0, :63].clone()),
        r"norm_out: got shape \[3, 64\]": dict(norm_out=lambda x: x[:3].clone()),
        r"residual_out: got shape \[4, 32\]": dict(residual_out=lambda x: x[:, :32].clone()),
        "residual_in: is not contiguous": dict(residual_in=lambda x: torch.cat([x, x], 1)[:, ::2]),
        "norm_out: overlaps the memory of rms_gamma": dict(rms_gamma=shared[0], norm_out=shared),
    }.items():
        refused(text, device=device, **change)
    for text, change in {
        "input: got float64, wanted float32": dict(input=lambda x: x.double()),
        "residual_in: got float16, wanted float32 as input has": dict(residual_in=lambda x: x.half()),
        "rms_gamma: got bfloat16": dict(rms_gamma=lambda x: x[0].bfloat16()),
    }.items():
        refused(text, TypeError, device=device, **change)
    for number, name in ((3, "FP4Quant"), (5, "OutFP4Quant")):
        with pytest.raises(UnsupportedError, match=f"got kARResidualRMSNorm{name}, wanted one without FP4"):
            allreduce_fusion(torch.ones(2, 8, device=device), one, number)
    with pytest.raises(ValueError, match="99 is not a valid AllReduceFusionPattern"):
        allreduce_fusion(torch.ones(2, 8, device=device), one, 99)
    with pytest.raises(GradientError, match="has no gradient"):
        allreduce_fusion(torch.ones(2, 8, device=device, requires_grad=True), one, SUM)
    assert int(one._state[0]) == before and (shared == 1).all(), "a kernel ran"


def test_invalid_arguments_of_quantisation(device):
    static, token, group = (Pattern(number) for number in (2, 10, 8))
    fp8, words = torch.float8_e4m3fn, torch.int32

    for text, change in {
        "scale_factor: got None": dict(pattern=static),
        "scale_factor: got no positive number": dict(pattern=static, scale_factor=0.0),
        "scale_factor: got 2 elements": dict(pattern=static, scale_factor=lambda x: x[0, :2].clone()),
        r"quant_out: got shape \[3, 64\]": dict(pattern=token, quant_out=lambda x: x[:3].to(fp8)),
        "quant_out: is not contiguous": dict(pattern=token, quant_out=lambda x: x.T.contiguous().to(fp8).T),
        "scale_out: got 3 elements": dict(pattern=token, scale_out=lambda x: x[0, :3].clone()),
        "block_quant_group_size: got None": dict(pattern=group),
        "block_quant_group_size: got 24, wanted a power of two from 4 to 128": dict(
            pattern=group, block_quant_group_size=24
        ),
        "input: got 64 columns, wanted a multiple": dict(pattern=group, block_quant_group_size=128),
        r"scale_out: got shape \[4, 2\], wanted \[4, 1\]": dict(
            pattern=group, block_quant_group_size=16, scale_out=lambda x: torch.ones(4, 2, device=x.device).to(words)
        ),
    }.items():
        refused(text, device=device, **change)
    for text, change in {
        "quant_out: got float8_e5m2, wanted float8_e4m3fn": dict(
            pattern=token, quant_out=lambda x: x.to(torch.float8_e5m2)
        ),
        "scale_out: got float16, wanted float32": dict(pattern=token, scale_out=lambda x: x[:, :1].half()),
        "scale_out: got float32, wanted int32": dict(
            pattern=group, block_quant_group_size=16, scale_out=lambda x: x[:, :1].clone()
        ),
    }.items():
        refused(text, TypeError, device=device, **change)


def test_partial_overlap(device):
    x = torch.randn(5, 64, device=device)
    with pytest.raises(ValueError, match="allreduce_fusion: output: overlaps the memory of input"):
        allreduce_fusion(x[:4], one_rank(device), SUM, output=x[1:])
    out = torch.empty(4, 64, device=device)
    with pytest.raises(ValueError, match="norm_out: overlaps the memory of residual_out"):
        allreduce_fusion(
            x[:4], one_rank(device), NORM, residual_in=x[:4].clone(), rms_gamma=x[4], residual_out=out, norm_out=out
        )


def test_an_input_that_does_not_fit(device, make_group):
    """All ranks raise, nothing is sent, and the next call works."""
    group = make_group(2, 4, 64, torch.float32)
    large = torch.ones(5, 64, device=device)
    for one in group.outcomes(lambda rank, workspace: allreduce_fusion(large, workspace, SUM)):
        assert isinstance(one, ValueError) and "input: got 1280 bytes" in str(one) and "at most 1024" in str(one)
    x, out = torch.ones(1, 256, device=device), [torch.zeros(1, 256, device=device) for _ in range(2)]
    group.run(lambda rank, workspace: allreduce_fusion(x, workspace, SUM, output=out[rank]))
    assert (out[0] == 2).all() and (out[1] == 2).all()


def test_another_device_than_the_workspace():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with pytest.raises(ValueError, match="input: is on cuda:0, another device than workspace's cpu"):
        allreduce_fusion(torch.ones(2, 8, device="cuda"), one_rank("cpu"), SUM)
