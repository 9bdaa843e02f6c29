"""Grouped GEMM in a CUDA graph whose groups change between replays, on the caller's stream and device."""

from __future__ import annotations

import pytest
import torch

from flashinfer.gemm import group_gemm_fp8_nt_groupwise
from flashinfer.grouped_mm import grouped_mm_bf16

from .oracle import SENTINEL, drawn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are of GPUs")
GROUPS = [[0, 3, 3, 40, 64], [0, 64, 64, 64, 64], [0, 1, 2, 3, 4], [5, 20, 20, 50, 51]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_groups_change_between_replays(dtype):
    a, b = drawn(64, 136, dtype=dtype, device="cuda"), drawn(4, 72, 136, dtype=dtype, device="cuda")
    begins = torch.tensor(GROUPS[0], dtype=torch.int32, device="cuda")
    out = torch.empty(64, 72, dtype=dtype, device="cuda")
    grouped_mm_bf16(a, b, begins, out, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_mm_bf16(a, b, begins, out, dtype)
    for groups in GROUPS:
        begins.copy_(torch.tensor(groups))
        out.fill_(SENTINEL)
        graph.replay()
        eager = torch.full_like(out, SENTINEL)
        grouped_mm_bf16(a, b, begins, eager, dtype)
        assert torch.equal(out, eager)
        assert bool((out[: groups[0]] == SENTINEL).all() and (out[groups[-1] :] == SENTINEL).all())


def test_scales_change_between_replays():
    a, b = (drawn(*shape, dtype=torch.float8_e4m3fn, device="cuda") for shape in ((48, 256), (2, 136, 256)))
    begins = torch.tensor([0, 17, 48], device="cuda")
    scales = torch.rand(48, 2, device="cuda"), torch.rand(2, 2, 2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    out = torch.empty(48, 136, dtype=torch.bfloat16, device="cuda")
    group_gemm_fp8_nt_groupwise(a, b, *scales, begins, scale_major_mode="K", out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        group_gemm_fp8_nt_groupwise(a, b, *scales, begins, scale_major_mode="K", out=out)
    for by in (1, 2, 4):
        scales[0].mul_(by)
        graph.replay()
        again = group_gemm_fp8_nt_groupwise(a, b, *scales, begins, scale_major_mode="K")
        assert torch.equal(out, again)
