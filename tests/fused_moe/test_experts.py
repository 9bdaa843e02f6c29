"""cutlass_fused_moe against a loop over experts in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer.errors import GradientError, UnsupportedError
from flashinfer.fused_moe import ActivationType, cutlass_fused_moe, cutlass_fused_moe_workspace_size, operators

from ..conftest import no_synchronisation
from .test_fused_moe import ROUNDING, activated


def layer(
    device: str, dtype: torch.dtype, tokens: int, top_k: int, experts: int, hidden: int, inner: int, gated: bool = True
):
    """Return input, experts, weights, and the two matrices of each expert, at a model's magnitude."""
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    ids = torch.rand(tokens, max(experts, top_k), device=device).argsort(1)[:, :top_k].int() % experts
    scales = torch.rand(tokens, top_k, device=device)
    first = (torch.randn(experts, inner * (2 if gated else 1), hidden, device=device) / hidden**0.5).to(dtype)
    second = (torch.randn(experts, hidden, inner, device=device) / inner**0.5).to(dtype)
    return x, ids, scales, first, second


def oracle(x, ids, scales, first, second, act=ActivationType.Swiglu, biases=(None, None), numbers=None):
    """Return the result and the norm of the experts' terms that it sums."""
    x, first, second = (one.cpu().double() for one in (x, first, second))
    ids, out = ids.cpu(), torch.zeros(x.shape[0], second.shape[1], dtype=torch.float64)
    size = torch.zeros_like(out)
    for token in range(x.shape[0]):
        for j, expert in enumerate(ids[token].tolist()):
            if not 0 <= expert < first.shape[0]:
                continue
            h = first[expert] @ x[token]
            h = h if biases[0] is None else h + biases[0][expert].cpu().double()
            given = [] if numbers is None else [one[expert].cpu().double() for one in numbers]
            a = activated(h, act, *given)
            weight = 1.0 if scales is None else float(scales[token, j])
            y = second[expert] @ a
            out[token] += weight * (y if biases[1] is None else y + biases[1][expert].cpu().double())
            size[token] += abs(weight) * (second[expert].square() @ a.square()).sqrt()
            size[token] += abs(weight) * second[expert].norm(dim=1) * a.norm() / a.numel() ** 0.5
    return out, size


def check(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor, dtype: torch.dtype, factor: float = 8.0) -> None:
    """Compare within three roundings, one of each factor of the terms, with errors of random sign."""
    bound = 1.01 * ROUNDING[got.dtype] * want.abs() + factor * (ROUNDING[dtype] + 2**-20) * (size + 1e-3)
    assert ((got.cpu().double() - want).abs() <= bound).all()


@pytest.mark.parametrize(
    "act",
    [
        ActivationType.Swiglu,
        ActivationType.GegluTanh,
        ActivationType.Relu2,
        ActivationType.SwigluStep,
        ActivationType.Situ,
    ],
    ids=lambda a: a.name,
)
def test_experts(act, device, dtype):
    gated = act in operators.GATED
    for tokens, top_k, experts, hidden, inner in (
        (1, 1, 1, 8, 8),
        (3, 2, 8, 136, 72),
        (70, 8, 16, 64, 40),
        (190, 2, 2, 40, 24),  # more rows of an expert than are gathered
        (0, 2, 4, 64, 64),
    ):
        x, ids, scales, first, second = layer(device, dtype, tokens, top_k, experts, hidden, inner, gated)
        out = torch.full((tokens + 2, hidden), 77.0, device=device, dtype=dtype)
        with no_synchronisation(device):
            (result,) = cutlass_fused_moe(
                x, ids, scales, first, second, dtype, None, output=out[1:-1], activation_type=act
            )
        assert result.data_ptr() == out[1:-1].data_ptr() and (out[[0, -1]] == 77).all()
        want, size = oracle(x, ids, scales, first, second, act)
        check(result, want, size, dtype, 8 if act != ActivationType.Relu2 else 16)


def test_integers_are_exact(device, dtype):
    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 3, shape, device=device).to(dtype)

    x, first, second = integers(40, 24), integers(6, 10, 24), integers(6, 24, 10)
    x[:, 1:-3], second[:, :, 2:] = 0, 0  # products of numbers of 16 bits stay exact
    ids = torch.randint(-1, 8, (40, 5), device=device, dtype=torch.int32)  # repeated experts, and experts elsewhere
    act = ActivationType.Identity
    (got,) = cutlass_fused_moe(x, ids, None, first, second, torch.float32, None, activation_type=act)
    want, _ = oracle(x, ids, None, first, second, act)
    assert got.cpu().double().equal(want)


def test_ranks_add_up(device):
    x, ids, scales, first, second = layer(device, torch.float32, 33, 3, 8, 48, 64)
    want, size = oracle(x, ids, scales, first, second)
    total = torch.zeros(33, 48, device=device)
    for ep in range(4):
        for tp in range(2):
            mine, cut = slice(2 * ep, 2 * ep + 2), slice(32 * tp, 32 * tp + 32)
            half = torch.cat([first[mine, :64][:, cut], first[mine, 64:][:, cut]], 1)
            total += cutlass_fused_moe(
                x, ids, scales, half, second[mine][:, :, cut].contiguous(), torch.float32, None, ep_size=4, ep_rank=ep,
                tp_size=2, tp_rank=tp,
            )[0]  # fmt: skip
    check(total, want, size, torch.float32, 32)
    nobody = cutlass_fused_moe(x, ids * 0 - 1, scales, first, second, torch.float32, None)[0]
    assert not nobody.any()


def test_rows_depend_on_no_other_row(device, dtype):
    x, ids, scales, first, second = layer(device, dtype, 90, 2, 4, 64, 48)
    ids[:50] = 2
    (whole,) = cutlass_fused_moe(x, ids, scales, first, second, dtype, None)
    order = torch.randperm(90, device=device)
    (shuffled,) = cutlass_fused_moe(x[order], ids[order], scales[order], first, second, dtype, None)
    assert shuffled.equal(whole[order])
    x[7] = torch.nan
    (other,) = cutlass_fused_moe(x, ids, scales, first, second, dtype, None)
    rows = torch.arange(90, device=device) != 7
    assert other[7].isnan().all() and other[rows].equal(whole[rows])


def test_biases_and_numbers_of_gates(device, dtype):
    x, ids, scales, first, second = layer(device, dtype, 20, 4, 5, 64, 48)
    biases = torch.randn(5, 96, device=device), torch.randn(5, 64, device=device)
    numbers = [torch.rand(5, device=device) + 0.5 for _ in range(3)]
    (got,) = cutlass_fused_moe(
        x, ids, scales, first, second, torch.float32, None, fc1_expert_biases=biases[0], fc2_expert_biases=biases[1],
        swiglu_alpha=numbers[0], swiglu_beta=numbers[1], swiglu_limit=numbers[2],
    )  # fmt: skip
    want, size = oracle(x, ids, scales, first, second, ActivationType.Swiglu, biases, numbers)
    check(got, want, size + 1, dtype)


@pytest.mark.parametrize("name", ["SwigluStep", "Situ"])
def test_numbers_of_other_gates(name, device, dtype):
    act = ActivationType[name]
    x, ids, scales, first, second = layer(device, dtype, 20, 4, 5, 64, 48)
    one, two = (torch.rand(5, device=device) + 0.3 for _ in range(2))
    given = dict(swiglu_limit=one) if name == "SwigluStep" else dict(situ_beta=one, situ_linear_beta=two)
    (got,) = cutlass_fused_moe(x, ids, scales, first, second, torch.float32, [], activation_type=int(act), **given)
    want, size = oracle(x, ids, scales, first, second, act, numbers=[one, two, one])
    check(got, want, size + 0.1, dtype)


def test_the_order_and_the_flags_of_today(device):
    """Pass biases before input_sf; a flag is accepted if false, and refused by name if true."""
    x, ids, scales, first, second = layer(device, torch.float32, 7, 2, 3, 16, 8)
    biases = torch.randn(3, 16, device=device), torch.randn(3, 16, device=device)
    flags = dict(
        input_sf=None, enable_alltoall=False, use_deepseek_fp8_block_scale=False, use_w4_group_scaling=False,
        use_mxfp8_act_scaling=False, min_latency_mode=False, use_packed_weights=False, use_wfp4afp8_humming=False,
        tune_max_num_tokens=64, enable_pdl=None, activation_type=3, swizzled_input_sf=True, use_fused_finalize=False,
        profile_ids=None, workspace_buffer=None, clamped_relu2_limit=None, situ_beta=None, situ_linear_beta=None,
        backend="cutlass",
    )  # fmt: skip
    out = torch.full((9, 16), 77.0, device=device)
    given = (x, ids, scales, first, second, torch.float32, [], *biases)
    (got,) = cutlass_fused_moe(*given, output=out[1:-1], **flags)
    assert got.data_ptr() == out[1:-1].data_ptr() and (out[[0, -1]] == 77).all()
    want, size = oracle(x, ids, scales, first, second, biases=biases)
    check(got, want, size + 1, torch.float32)
    limit = torch.full((3,), 0.25, device=device)
    (alone,) = cutlass_fused_moe(*given[:7], None, None, None, None, None, limit)
    want, size = oracle(x, ids, scales, first, second, numbers=[torch.ones(3), torch.zeros(3), limit])
    check(alone, want, size + 1, torch.float32)
    others = dict(
        use_w4a8_group_scaling=True, use_mxfp8_act_scaling=True, use_packed_weights=True, use_wfp4afp8_humming=True,
        min_latency_mode=True, input_sf=x, clamped_relu2_limit=limit, backend="trtllm",
        cluster_size=2,
    )  # fmt: skip
    for name, value in others.items():
        out.fill_(77)
        with pytest.raises(UnsupportedError, match=f"cutlass_fused_moe: {name}: has no kernel"):
            cutlass_fused_moe(*given, output=out[1:-1], **{name: value})
        assert (out == 77).all()


WORKSPACE = dict(hidden_size=64, intermediate_size=40, num_experts_total=6, top_k=3, x_dtype=torch.float32)


@pytest.mark.parametrize(
    "act", [ActivationType.Swiglu, ActivationType.Geglu, ActivationType.Relu2], ids=lambda a: a.name
)
def test_a_workspace_of_the_caller(act, device):
    x, ids, scales, first, second = layer(device, torch.float32, 20, 3, 6, 64, 40, act.is_gated)
    sizes = [
        cutlass_fused_moe_workspace_size(n, weight_dtype=torch.float32, activation_type=act, device=device, **WORKSPACE)
        for n in (0, 1, 19, 20, 64)
    ]
    assert sizes == sorted(set(sizes)) and sizes[0] == 0 and all(size % 128 == 0 for size in sizes)

    def moe(buffer: torch.Tensor | None) -> torch.Tensor:
        given = x, ids, scales, first, second, torch.float32, None
        return cutlass_fused_moe(*given, workspace_buffer=buffer, activation_type=act)[0]

    buffer = torch.full((sizes[3] + 256,), 77, dtype=torch.uint8, device=device)
    assert moe(buffer[128:-128]).equal(moe(None)) and moe(buffer.view(torch.int8)[128:-128]).equal(moe(None))
    assert (buffer[:128] == 77).all() and (buffer[-128:] == 77).all() and (buffer[128:-128] != 77).any()
    for kind, text, other in (
        (ValueError, f"got {sizes[3] - 1} bytes, wanted at least {sizes[3]}", buffer[: sizes[3] - 1]),
        (ValueError, "got a start at byte 1", buffer[1:]),
        (ValueError, r"got shape .* and strides \[2\], wanted a contiguous vector", buffer[::2]),
        (ValueError, "got shape .*, wanted a contiguous vector", buffer[None]),
        (TypeError, "got torch.float32", buffer.float()),
        (TypeError, "got int, wanted Tensor", 77),
    ):
        with pytest.raises(kind, match=f"cutlass_fused_moe: workspace_buffer: {text}"):
            moe(other)
    if device != "cpu":
        with pytest.raises(ValueError, match="workspace_buffer: got a tensor on cpu"):
            moe(buffer.cpu())


def test_a_workspace_size_refuses():
    def size(**other: Any) -> int:
        return cutlass_fused_moe_workspace_size(**{**WORKSPACE, "max_num_tokens": 4, "weight_dtype": None, **other})

    for kind, text, other in (
        (ValueError, "top_k: got -1", dict(top_k=-1)),
        (TypeError, "max_num_tokens: got 1.5, wanted an integer", dict(max_num_tokens=1.5)),
        (UnsupportedError, "min_latency_mode", dict(min_latency_mode=True)),
        (UnsupportedError, "use_mxfp8_act_scaling", dict(use_mxfp8_act_scaling=True)),
        (UnsupportedError, "backend", dict(backend="trtllm")),
    ):
        with pytest.raises(kind, match=f"cutlass_fused_moe_workspace_size: {text}"):
            size(**other)
    assert size(x_dtype=torch.float16) < size()


def test_the_numbers_of_activations_and_routing_are_those_of_engines():
    from flashinfer import tllm_enums
    from flashinfer.fused_moe import core

    names = "Gelu Relu Silu Swiglu Geglu SwigluBias Relu2 SwigluStep GegluTanh Identity Situ InvalidType ClampedRelu2"
    assert {act.name: act.value for act in ActivationType} == {name: i for i, name in enumerate(names.split())}
    gated = {"Swiglu", "Geglu", "SwigluBias", "SwigluStep", "GegluTanh", "Situ"}
    assert {act.name for act in ActivationType if act.is_gated} == gated
    assert all(tllm_enums.is_gated_activation(int(act)) == act.is_gated for act in ActivationType)
    with pytest.raises(ValueError, match="99"):
        tllm_enums.is_gated_activation(99)
    assert tllm_enums.RoutingMethodType.TopKSigmoid == 9 and tllm_enums.RoutingMethodType.Unspecified == 10
    for name in tllm_enums.__all__:
        assert getattr(core, name) is getattr(tllm_enums, name)
    assert torch.finfo(torch.float32).max == core.DEFAULT_SWIGLU_LIMIT
    assert (core.DEFAULT_SWIGLU_ALPHA, core.DEFAULT_SWIGLU_BETA) == (1.0, 0.0)
    assert (core.DEFAULT_SITU_BETA, core.DEFAULT_SITU_LINEAR_BETA) == (4.0, 25.0)


def eight_bits(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.float().abs().amax(dims, keepdim=True).clamp(min=1e-6) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.cpu().double() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_eight_bits_with_a_scale_of_each_expert(device, dtype):
    x, ids, scales, first, second = layer(device, torch.float32, 40, 3, 6, 128, 64)
    (x8, by_x), (first8, by_first), (second8, by_second) = (
        eight_bits(x, (0, 1)),
        *(eight_bits(w, (1, 2)) for w in (first, second)),
    )
    by_hidden = torch.tensor(8.0, device=device)  # values beyond 56 are clipped
    given = [(by_first.flatten() * by_x.flatten()), by_hidden, by_second.flatten() / by_hidden, by_x.flatten()]
    (got,) = cutlass_fused_moe(x8, ids, scales, first8, second8, dtype, given)
    want, _ = oracle(x8.float() * by_x, ids, scales, first8.float() * by_first, second8.float() * by_second)
    assert got.dtype == dtype and relative(got, want) < 0.06  # the intermediate result has four bits


@pytest.mark.parametrize("tokens, top_k, experts, hidden, inner", [(40, 3, 6, 256, 128), (200, 2, 2, 384, 256)])
def test_eight_bits_with_scales_of_blocks(tokens, top_k, experts, hidden, inner, device):
    x, ids, scales, first, second = layer(device, torch.bfloat16, tokens, top_k, experts, hidden, inner)

    def blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = w.float().unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
        quantised, scale = eight_bits(parts, (2, 4))
        wide = (quantised.float() * scale).flatten(3, 4).flatten(1, 2)
        return quantised.flatten(3, 4).flatten(1, 2), scale[:, :, 0, :, 0].contiguous(), wide

    (first8, by_first, wide_first), (second8, by_second, wide_second) = blocks(first), blocks(second)
    want, _ = oracle(x, ids, scales, wide_first, wide_second)
    for name in ("use_fp8_block_scaling", "use_deepseek_fp8_block_scale"):
        (got,) = cutlass_fused_moe(
            x, ids, scales, first8, second8, torch.bfloat16, [by_first, by_second], **{name: True}
        )  # fmt: skip
        assert relative(got, want) < 0.09  # input and intermediate result have four bits


def test_one_graph_for_all_routings(device, cold_dynamo):
    def moe(x: torch.Tensor, logits: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        from flashinfer.fused_moe import route

        scales, ids = route(logits, 2, 1)
        return cutlass_fused_moe(x, ids, scales, first, second, x.dtype, None)[0]

    compiled = torch.compile(moe, fullgraph=True, dynamic=True)
    for tokens in (9, 33, 4):
        x, _, _, first, second = layer(device, torch.bfloat16, tokens, 2, 8, 64, 48)
        logits = torch.randn(tokens, 8, device=device)
        assert compiled(x, logits, first, second).equal(moe(x, logits, first, second))


def check_replays(call: Callable[[torch.Tensor | None], torch.Tensor], x: torch.Tensor, ids: torch.Tensor) -> None:
    """Capture a call with an output once, and compare its replays with eager calls, for other inputs and routings."""
    out = torch.empty_like(x)
    call(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(out)
    for _ in range(3):
        ids.copy_(torch.randint(0, int(torch.randint(1, 17, ())), ids.shape))
        x.normal_()
        graph.replay()
        assert out.equal(call(None))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_replays_other_routings():
    x, ids, scales, first, second = layer("cuda", torch.bfloat16, 64, 4, 16, 128, 64)

    def call(to: torch.Tensor | None) -> torch.Tensor:
        return cutlass_fused_moe(x, ids, scales, first, second, x.dtype, None, output=to)[0]

    check_replays(call, x, ids)


def test_invalid_arguments(device):
    x, ids, scales, first, second = layer(device, torch.float32, 4, 2, 3, 16, 8)
    eight = first.to(torch.float8_e4m3fn), second.to(torch.float8_e4m3fn)

    def refused(kind: type[Exception], text: str, *places: Any, **other: Any) -> None:
        given: list[Any] = [x, ids, scales, first, second, torch.float32, None]
        for place, value in places:
            given[place] = value
        with pytest.raises(kind, match=text):
            cutlass_fused_moe(*given, **other)

    refused(ValueError, "input: got 1 dimensions, wanted 2", (0, x[0]))
    refused(ValueError, "fc1_expert_weights: got shape .*3, 15", (3, first[:, :15]))
    refused(ValueError, "token_selected_experts: got shape", (1, ids[:3]))
    refused(TypeError, "token_selected_experts: got torch.int64", (1, ids.long()))
    refused(ValueError, "token_final_scales: got shape", (2, scales[:, :1]))
    refused(TypeError, "token_final_scales: got torch.float16", (2, scales.half()))
    refused(TypeError, "input: got torch.float16", (0, x.half()))
    refused(TypeError, "fc2_expert_weights: got torch.float16", (4, second.half()))
    refused(TypeError, "output_dtype: got torch.int32", (5, torch.int32))
    refused(ValueError, "quant_scales: got 1 tensors, wanted 0", (6, [scales]))
    refused(
        ValueError, "quant_scales: got 0 tensors, wanted 4", (0, x.to(eight[0].dtype)), (3, eight[0]), (4, eight[1])
    )
    refused(TypeError, "wanted torch.float8_e4m3fn for block", use_fp8_block_scaling=True)
    refused(
        ValueError,
        r"quant_scales\[0\]: got 2 dimensions",
        (3, eight[0]),
        (4, eight[1]),
        (6, [scales, scales]),
        use_fp8_block_scaling=True,
    )
    refused(ValueError, "ep_rank: got 2, wanted 0 to", ep_size=2, ep_rank=2)
    refused(ValueError, "output: got shape", output=x[:2])
    refused(TypeError, "output: got torch.float16", output=x.half())
    refused(TypeError, "output: got float, wanted Tensor", output=1.0)
    refused(TypeError, "token_final_scales: got float, wanted Tensor", (2, 1.0))
    refused(TypeError, "fc1_expert_biases: got float, wanted Tensor", fc1_expert_biases=1.0)
    refused(ValueError, r"fc1_expert_biases: got shape \[3, 8\], wanted \[3, 16\]", fc1_expert_biases=first[:, :8, 0])
    refused(ValueError, "fc2_expert_biases: got 1 dimensions, wanted 2", fc2_expert_biases=second[0, :, 0])
    two = (6, [scales, 1.0])
    refused(TypeError, r"quant_scales\[1\]: got float", (3, eight[0]), (4, eight[1]), two, use_fp8_block_scaling=True)
    refused(ValueError, "activation_type: got 'silu', wanted an ActivationType", activation_type="silu")
    refused(UnsupportedError, "fc1_expert_weights", (3, first.to(torch.uint8)))
    refused(UnsupportedError, "min_latency_mode", min_latency_mode=True)
    refused(UnsupportedError, "ClampedRelu2 has no kernel", activation_type=ActivationType.ClampedRelu2)
    refused(UnsupportedError, "InvalidType has no kernel", activation_type=ActivationType.InvalidType)
    numbers = torch.ones(3, device=device)
    refused(ValueError, "activation_type: got Swiglu, wanted Situ for situ_beta", situ_beta=numbers)
    refused(
        ValueError, "got Situ, wanted Swiglu or SwigluBias for swiglu_beta", swiglu_beta=numbers, activation_type=10
    )
    refused(ValueError, r"swiglu_limit: got shape \[2\], wanted \[3\]", swiglu_limit=numbers[:2])
    refused(TypeError, "swiglu_alpha: got torch.float16", swiglu_alpha=numbers.half())
    refused(TypeError, "fc1_expert_biases: got int, wanted Tensor", (6, None), fc1_expert_biases=1)
    refused(GradientError, "has no gradient", (0, x.clone().requires_grad_()))
