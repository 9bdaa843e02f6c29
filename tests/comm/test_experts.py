"""Sums over experts before the all-reduce: values, bits of the sum apart, older names, and refused arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.comm import _experts, _trtllm
from flashinfer.comm.allreduce import allreduce_fusion
from flashinfer.comm.trtllm_ar import AllReduceFusionPattern as Pattern
from flashinfer.errors import UnsupportedError

from ..conftest import DTYPES
from .cases import EPS, assert_same_bits, normed, one_rank, summed
from .ranks import Ranks

NORM, FINALIZE = Pattern.kARResidualRMSNorm, Pattern.kMoEFinalizeARResidualRMSNorm
REDUCTION, FP8 = Pattern.kMoEReductionARResidualRMSNorm, Pattern.kMoEFinalizeARResidualRMSNormFP8Quant
SIZE = 2
BOUND = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def filled(like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, 77)


def finalize_inputs(tokens: int, top_k: int, hidden: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return arguments of one rank: rows in a random order, some of other ranks."""
    rows = torch.randperm(tokens * top_k, device=device).int().view(tokens, top_k)
    rows[torch.rand(rows.shape, device=device) < 0.3] = -1
    return dict(
        input=torch.randn(tokens * top_k + 3, hidden, device=device).to(dtype),
        expanded_idx_to_permuted_idx=rows,
        expert_scale_factor=torch.rand(tokens, top_k, device=device).to(dtype),
        shared_expert_output=torch.randn(tokens, hidden, device=device).to(dtype),
    )


def finalize_oracle(given: dict[str, Any]) -> torch.Tensor:
    rows = given["expanded_idx_to_permuted_idx"].long()
    taken = given["input"].double()[rows.clamp(min=0)] * (rows >= 0)[..., None]
    scales, shared = given["expert_scale_factor"], given["shared_expert_output"]
    total = (taken * (1 if scales is None else scales.double()[..., None])).sum(1)
    return total if shared is None else total + shared.double()


def finalized(given: dict[str, Any]) -> torch.Tensor:
    return _experts.finalized("op", *given.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("optional", [True, False])
def test_finalize(dtype, optional, device, make_group):
    """The sum over ranks of each rank's experts, the norm and FP8, with and without scales and a shared expert."""
    tokens, hidden = 7, 264
    group = make_group(SIZE, tokens, hidden, dtype)
    parts = [finalize_inputs(tokens, 4, hidden, dtype, device) for _ in range(SIZE)]
    if not optional:
        for one in parts:
            one["expert_scale_factor"] = one["shared_expert_output"] = None
    residual, weight = (
        torch.randn(tokens, hidden, device=device).to(dtype),
        torch.randn(hidden, device=device).to(dtype),
    )
    sums, residuals, norms, quants = [], [], [], []
    for one in parts:
        sums.append(filled(residual)), residuals.append(filled(residual)), norms.append(filled(residual))
        quants.append(torch.full((tokens, hidden), 0x55, dtype=torch.uint8, device=device))
        total = finalized(one)  # a first use of a kernel could wait for those of other ranks
        torch.testing.assert_close(total.double(), finalize_oracle(one), rtol=BOUND[dtype], atol=BOUND[dtype])

    def body(rank: int, workspace: Any) -> None:
        common = dict(residual_in=residual, rms_gamma=weight, rms_eps=EPS, weight_bias=1.0, **parts[rank])
        result = allreduce_fusion(
            workspace=workspace, pattern=FINALIZE, output=sums[rank], residual_out=residuals[rank],
            norm_out=norms[rank], **common,
        )  # fmt: skip
        assert result is norms[rank]
        fp8 = quants[rank].view(torch.float8_e4m3fn)
        allreduce_fusion(workspace=workspace, pattern=FP8, quant_out=fp8, scale_factor=0.5, **common)

    group.run(body)
    want = summed([finalized(one) for one in parts])
    for rank in range(SIZE):
        assert_same_bits(sums[rank], want)
        assert_same_bits(residuals[rank], (want.float() + residual.float()).to(dtype))
        assert_same_bits(norms[rank], norms[0])
        fp8 = (norms[0].float() * 2).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(quants[rank], fp8.view(torch.uint8))
    expected = normed(want, residual, weight, 1.0)
    torch.testing.assert_close(norms[0].double(), expected, rtol=BOUND[dtype], atol=BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduction(dtype, device, make_group):
    """Experts first or flat, and the token's own row from either argument."""
    tokens, hidden, experts = 5, 520, 3
    group = make_group(SIZE, tokens, hidden, dtype)
    weight, residual = (
        torch.randn(hidden, device=device).to(dtype),
        torch.randn(tokens, hidden, device=device).to(dtype),
    )
    own = [torch.randn(tokens, hidden, device=device).to(dtype) for _ in range(SIZE)]
    active = [torch.randn(experts, tokens, hidden, device=device).to(dtype) for _ in range(SIZE)]
    scales = [torch.rand(experts, tokens, device=device) for _ in range(SIZE)]
    want = []
    for x, rows, scale in zip(own, active, scales, strict=True):
        total = _experts.reduced("op", x, experts, scale, rows)
        oracle = (rows.double() * scale.double()[..., None]).sum(0) + x.double()
        torch.testing.assert_close(total.double(), oracle, rtol=BOUND[dtype], atol=BOUND[dtype])
        want.append(total)
    residuals, norms = [filled(x) for x in own], [filled(x) for x in own]

    def body(rank: int, workspace: Any) -> None:
        flat = rank == 1
        allreduce_fusion(
            torch.zeros_like(own[rank]) if flat else own[rank], workspace, REDUCTION, residual_in=residual,
            residual_out=residuals[rank], norm_out=norms[rank], rms_gamma=weight, rms_eps=EPS,
            moe_reduction_device_num_experts=experts, moe_reduction_scale_input=scales[rank].view(-1),
            moe_reduction_active_experts_token_input=active[rank].view(-1) if flat else active[rank],
            moe_reduction_token_input=own[rank] if flat else None,
        )  # fmt: skip

    group.run(body)
    total = summed(want)
    for rank in range(SIZE):
        assert_same_bits(residuals[rank], (total.float() + residual.float()).to(dtype))
        assert_same_bits(norms[rank], norms[0])
    torch.testing.assert_close(
        norms[0].double(), normed(total, residual, weight, 0), rtol=BOUND[dtype], atol=BOUND[dtype]
    )


def test_older_names(device):
    """Flat tensors of both functions give the bits of the new one."""
    tokens, hidden, experts, dtype = 5, 264, 3, torch.bfloat16
    create = _trtllm.trtllm_create_ipc_workspace_for_all_reduce_fusion
    group = Ranks(
        SIZE,
        lambda rank, backend: create(rank, SIZE, tokens, hidden, comm_backend=backend, device=device),
        device,
    )
    parts = [finalize_inputs(tokens, experts, hidden, dtype, device) for _ in range(SIZE)]
    active = [torch.randn(experts * tokens * hidden, device=device).to(dtype) for _ in range(SIZE)]
    scales = [torch.rand(experts * tokens, device=device) for _ in range(SIZE)]
    weight = torch.randn(hidden, device=device).to(dtype)
    residual = torch.randn(tokens, hidden, device=device).to(dtype)
    outs = [[filled(residual) for _ in parts] for _ in range(5)]
    first = [finalized(one) for one in parts]
    own = [one["shared_expert_output"] for one in parts]
    second = [_experts.reduced("op", own[r], experts, scales[r], active[r]) for r in range(SIZE)]

    def body(rank: int, workspace: Any) -> None:
        x = parts[rank]
        _trtllm.trtllm_moe_finalize_allreduce_fusion(
            x["input"].view(1, -1, hidden), residual, weight, x["expanded_idx_to_permuted_idx"], outs[0][rank],
            outs[1][rank].view(-1), workspace[1], True, rank, SIZE, EPS, x["shared_expert_output"],
            x["expert_scale_factor"] / 2, routed_scaling_factor=2.0,
        )  # fmt: skip
        _trtllm.trtllm_moe_allreduce_fusion(
            SIZE, rank, tokens, hidden, workspace[1], True, residual.view(-1), weight, EPS, 1.0, experts, scales[rank],
            active[rank], own[rank].view(-1), None, outs[4][rank].view(-1), outs[2][rank], outs[3][rank].view(-1),
            None, None,
        )  # fmt: skip

    group.run(body)
    for sums, got_residual, got_norm in ((first, outs[1], outs[0]), (second, outs[2], outs[3])):
        total = summed(sums)
        want, kept = filled(residual), filled(residual)
        allreduce_fusion(
            total, one_rank(device), NORM, residual_in=residual, residual_out=kept, norm_out=want, rms_gamma=weight,
            rms_eps=EPS,
        )  # fmt: skip
        for rank in range(SIZE):
            assert_same_bits(got_residual[rank], kept)
            assert_same_bits(got_norm[rank], want)
    assert_same_bits(outs[4][1], summed(second))
    for one in group.workspaces:
        _trtllm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(one[0])


def test_refused_arguments(device):
    given = finalize_inputs(4, 2, 64, torch.float32, device)
    residual, weight = torch.zeros(4, 64, device=device), torch.ones(64, device=device)
    out = torch.full((4, 64), 77.0, device=device)
    common = dict(
        workspace=one_rank(device), residual_in=residual, rms_gamma=weight, norm_out=out, residual_out=out.clone()
    )
    x = given["input"]
    for pattern, text, kind, change in (
        (FINALIZE, "expanded_idx_to_permuted_idx: got None", ValueError, dict(expanded_idx_to_permuted_idx=None)),
        (FINALIZE, "expanded_idx_to_permuted_idx: got torch.int64, wanted int32", TypeError,
         dict(expanded_idx_to_permuted_idx=given["expanded_idx_to_permuted_idx"].long())),
        (FINALIZE, r"expert_scale_factor: got shape \[3, 2\], wanted \[4, 2\]", ValueError,
         dict(expert_scale_factor=given["expert_scale_factor"][:3])),
        (FINALIZE, r"shared_expert_output: got shape \[3, 64\]", ValueError, dict(shared_expert_output=residual[:3])),
        (FINALIZE, "shared_expert_output: got torch.float16", TypeError, dict(shared_expert_output=residual.half())),
        (FINALIZE, "input: got 7 rows, wanted 8 at least", ValueError, dict(input=x[:7])),
        (FINALIZE, r"residual_in: got shape \[3, 64\], wanted \[4, 64\]", ValueError, dict(residual_in=residual[:3])),
        (REDUCTION, "moe_reduction_device_num_experts: got None", ValueError, dict(input=residual)),
        (REDUCTION, "moe_reduction_scale_input: got None", ValueError,
         dict(input=residual, moe_reduction_device_num_experts=2)),
        (REDUCTION, r"moe_reduction_active_experts_token_input: got shape \[4, 64\], wanted 512 contiguous", ValueError,
         dict(input=residual, moe_reduction_device_num_experts=2, moe_reduction_scale_input=weight[:8],
              moe_reduction_active_experts_token_input=residual)),
    ):  # fmt: skip
        with pytest.raises(kind, match=f"^allreduce_fusion: {text}"):
            allreduce_fusion(pattern=pattern, **{**given, **common, **change})
    assert (out == 77).all(), "something was written"
    handles, table = _trtllm.trtllm_create_ipc_workspace_for_all_reduce_fusion(0, 1, 4, 64, device=device)
    with pytest.raises(UnsupportedError, match="trtllm_moe_allreduce_fusion: quant_out: got a tensor"):
        _trtllm.trtllm_moe_allreduce_fusion(
            1, 0, 4, 64, table, False, residual, weight, EPS, 1.0, 1, weight[:4], residual, residual, None, None, None,
            out, out, None,
        )  # fmt: skip
    with pytest.raises(UnsupportedError, match="trtllm_moe_finalize_allreduce_fusion: quant_out: got a tensor"):
        _trtllm.trtllm_moe_finalize_allreduce_fusion(
            x, residual, weight, given["expanded_idx_to_permuted_idx"], out, out, table, False, 0, 1, EPS, None, None,
            quant_out=out,
        )  # fmt: skip
    with pytest.raises(ValueError, match="trtllm_moe_finalize_allreduce_fusion: world_rank: got rank 1 of 1"):
        _trtllm.trtllm_moe_finalize_allreduce_fusion(
            x, residual, weight, given["expanded_idx_to_permuted_idx"], out, out, table, False, 1, 1, EPS, None, None
        )
    _trtllm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles)
