"""The all-reduce by FlashInfer's older names: values of the new function, flat tensors, pieces, and refused arguments."""

from __future__ import annotations

import ctypes
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer.comm import _trtllm, _vllm, cuda_ipc
from flashinfer.comm._codes import AllReduceFusionOp as Op
from flashinfer.comm._codes import AllReduceFusionPattern as Pattern
from flashinfer.errors import GroupError, UnsupportedError
from flashinfer.norm import fused_add_rmsnorm, rmsnorm

from ..conftest import DTYPES
from .cases import EPS, assert_same_bits, normed, summed
from .ranks import Meeting, Ranks, ThreadBackend, on_threads

SIZE, TOKENS, HIDDEN = 3, 5, 264


def older(create: Any, device: str) -> Ranks:
    """Return ranks with the result of an older function, ``create(rank, ...)``, in the place of a workspace."""
    return Ranks(SIZE, lambda rank, backend: create(rank, comm_backend=backend, device=device), device)


def drawn(*shape: int, dtype: torch.dtype, device: str, size: int = SIZE) -> list[torch.Tensor]:
    return [torch.randn(*shape, device=device).to(dtype) for _ in range(size)]


def filled(like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, 77)


# The fusion


def fusion_group(device: str, **options: Any) -> Ranks:
    return older(
        lambda rank, **given: _trtllm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            rank, SIZE, TOKENS, HIDDEN, create_metadata=True, **options, **given
        ),
        device,
    )


def fuse(rank: int, workspace: Any, x: torch.Tensor, pattern: int, **change: Any) -> None:
    arguments: dict[str, Any] = dict(
        allreduce_in=x, world_size=SIZE, world_rank=rank, token_num=TOKENS, hidden_dim=HIDDEN,
        workspace_ptrs=workspace[1], launch_with_pdl=True, trigger_completion_at_end=True, fp32_acc=False,
        pattern_code=pattern, use_oneshot=None, allreduce_out=None, residual_in=None, residual_out=None, norm_out=None,
        quant_out=None, scale_out=None, rms_gamma=None, rms_eps=None, scale_factor=None, layout_code=None,
        metadata=workspace[2],
    )  # fmt: skip
    assert _trtllm.trtllm_allreduce_fusion(**{**arguments, **change}) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fusion(dtype, device):
    """Flat and two-dimensional tensors, the sum, the norm, and FP8 in memory of another dtype."""
    group = fusion_group(device, use_fp32_lamport=dtype == torch.float32)
    parts = drawn(TOKENS * HIDDEN, dtype=dtype, device=device)
    residual, weight = (
        drawn(TOKENS * HIDDEN, dtype=dtype, device=device)[0],
        torch.randn(HIDDEN, device=device).to(dtype),
    )
    sums, residuals, norms, more = ([filled(x) for x in parts] for _ in range(4))
    quants = [torch.full_like(x, 77) for x in parts]

    def body(rank: int, workspace: Any) -> None:
        shape = random.choice([(-1,), (TOKENS, HIDDEN), (1, TOKENS * HIDDEN)])
        x = parts[rank].view(shape)
        fuse(rank, workspace, x, Pattern.kAllReduce, allreduce_out=sums[rank])
        given = dict(residual_in=residual, rms_gamma=weight, rms_eps=EPS, weight_bias=1.0)
        fuse(
            rank, workspace, x, Pattern.kARResidualRMSNorm, residual_out=residuals[rank], norm_out=norms[rank], **given
        )
        fuse(
            rank, workspace, x, Pattern.kARResidualRMSNormOutFP8Quant, norm_out=more[rank], quant_out=quants[rank],
            scale_factor=0.5, metadata=None, **given,
        )  # fmt: skip

    group.run(body)
    total = summed(parts)
    for rank in range(SIZE):
        assert_same_bits(sums[rank], total)
        assert_same_bits(residuals[rank], (total.float() + residual.float()).to(dtype))
        assert_same_bits(norms[rank], norms[0])
        assert_same_bits(more[rank], norms[0])
        got, rest = quants[rank].view(torch.uint8).split([total.numel(), total.numel() * (dtype.itemsize - 1)])
        want = (norms[0].float() * 2).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(got, want.view(torch.uint8))
        assert torch.equal(rest, filled(total).view(torch.uint8)[total.numel() :]), "bytes after the result changed"
    bound = {torch.float32: 2e-6, torch.float16: 1.1e-3, torch.bfloat16: 8e-3}[dtype]
    want = normed(total.view(TOKENS, HIDDEN), residual.view(TOKENS, HIDDEN), weight, 1.0)
    torch.testing.assert_close(norms[0].view(TOKENS, HIDDEN).double(), want, rtol=bound, atol=bound / 100)
    for handles, *_ in group.workspaces:
        _trtllm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles)
        _trtllm.trtllm_destroy_ipc_workspace_for_all_reduce(handles)  # again, as SGLang 0.4 calls it


def test_refused_arguments_of_the_fusion(device):
    group = fusion_group(device)
    x, out = (
        torch.ones(TOKENS * HIDDEN, device=device).bfloat16(),
        torch.zeros(TOKENS * HIDDEN, device=device).bfloat16(),
    )
    first = group.workspaces[0]
    common: dict[str, Any] = dict(pattern=Pattern.kAllReduce, allreduce_out=out)
    for text, change in {
        "allreduce_out: got None": dict(allreduce_out=None),
        r"allreduce_in: got shape \[1320\], wanted 1056 contiguous elements": dict(token_num=4),
        "world_rank: got rank 0 of 2, wanted rank 0 of 3": dict(world_size=2),
        "workspace_ptrs: got an unknown": dict(workspace_ptrs=first[1].clone()),
        r"metadata\['max_token_num'\]: got 5 with 6 of the call": dict(token_num=6),
        r"metadata\['hidden_dim'\]: got 264 with 88": dict(hidden_dim=88),
        r"metadata\['use_fp32_lamport'\]: got False with True": dict(x=x.float()),
        "norm_out: got None": dict(pattern=Pattern.kARResidualRMSNorm),
        "quant_out: got None": dict(pattern=Pattern.kARResidualRMSNormFP8Quant),
        "scale_out: got None": dict(pattern=Pattern.kARResidualRMSNormDynamicFP8Quant, quant_out=x),
        r"quant_out: got shape \[7\], wanted at least 1320": dict(
            pattern=Pattern.kARResidualRMSNormFP8Quant, quant_out=x[:7]
        ),
    }.items():
        with pytest.raises(ValueError, match=f"^trtllm_allreduce_fusion: {text}"):
            fuse(0, first, **{"x": x, **common, **change})
    assert (out == 0).all(), "something was written"
    for handles, *_ in group.workspaces:
        _trtllm.trtllm_destroy_ipc_workspace_for_all_reduce(handles)
    with pytest.raises(ValueError, match="workspace_ptrs: got an unknown or destroyed workspace"):
        fuse(0, first, x, **common)


def test_forms_of_a_fusion_workspace(device):
    create = _trtllm.trtllm_create_ipc_workspace_for_all_reduce_fusion
    for options, count in (
        ({}, 2),
        (dict(create_metadata=True), 3),
        (dict(use_symm_dev_mem=True), 2),
        (dict(create_metadata=True, use_symm_dev_mem=True), 4),
    ):
        made = create(0, 1, 4, 64, device=device, **options)
        assert len(made) == count and made[1].dtype == torch.int64 and made[0][0] == made[0][1]
        if count > 2:
            assert made[-1]["max_token_num"] == 4 and made[-1]["use_fp32_lamport"] is False
        _trtllm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(made[0])


# The all-reduce with a list of addresses


def custom(rank: int, handles: Any, x: torch.Tensor, out: torch.Tensor, op: int, **change: Any) -> None:
    pointers = [torch.tensor(one, dtype=torch.int64) for one in handles]
    arguments: dict[str, Any] = dict(
        inp=x, out=out, tp_size=SIZE, tp_rank=rank, token_num=TOKENS, fusion_op_code=op, strategy_code=4,
        config_code=0, launch_with_pdl=False, flag_value=1, peer_comm_buffer_ptrs=pointers[0],
        peer_barrier_ptrs_in=pointers[2], peer_barrier_ptrs_out=pointers[3], bias=None, residual=None, weight=None,
        weight_pre_residual_norm=None, eps=EPS, intermediate_buffer=None, lamport_peer_comm_buffer_ptrs_0=pointers[4],
        lamport_peer_comm_buffer_ptrs_1=pointers[5], lamport_peer_comm_buffer_ptrs_2=pointers[6],
    )  # fmt: skip
    _trtllm.trtllm_custom_all_reduce(**{**arguments, **change})


def custom_group(device: str) -> Ranks:
    create = _trtllm.trtllm_create_ipc_workspace_for_all_reduce
    return older(lambda rank, **given: create(rank, SIZE, TOKENS, HIDDEN, **given), device)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_custom_all_reduce(dtype, with_bias, device):
    """The sum, one norm, and a norm before the residual too."""
    group = custom_group(device)
    parts = drawn(TOKENS, HIDDEN, dtype=dtype, device=device)
    residual = torch.randn_like(parts[0])
    before, weight, bias = (torch.randn(HIDDEN, device=device).to(dtype) for _ in range(3))
    rmsnorm(residual + bias, before)  # a first use of a kernel could wait for those of other ranks
    fused_add_rmsnorm(residual.clone(), residual.clone().copy_(residual), weight)
    sums, norms, kept, twice, more = ([filled(x) for x in parts] for _ in range(5))

    def body(rank: int, handles: Any) -> None:
        _trtllm.trtllm_lamport_initialize_all(handles[4][rank], handles[5][rank], handles[6][rank], 64, dtype)
        given: dict[str, Any] = dict(
            bias=bias if with_bias else None, residual=residual, weight=weight, weight_pre_residual_norm=before
        )
        x = parts[rank]
        custom(rank, handles, x.view(-1), sums[rank], Op.NONE, **given)
        custom(rank, handles, x, norms[rank], Op.RESIDUAL_RMS_NORM, intermediate_buffer=kept[rank].view(-1), **given)
        custom(rank, handles, x, twice[rank], Op.RESIDUAL_RMS_PREPOST_NORM, intermediate_buffer=more[rank], **given)

    group.run(body)
    total, bound = summed(parts), {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    added = bias.double() if with_bias else 0
    want_kept = total.double() + residual.double() + added
    want_more = rms(total.double() + added, before) + residual.double()
    for rank in range(SIZE):
        assert_same_bits(sums[rank], total)
        for got, want in (
            (kept, want_kept), (norms, rms(want_kept, weight)), (more, want_more), (twice, rms(want_more, weight))
        ):  # fmt: skip
            torch.testing.assert_close(got[rank].double(), want, rtol=bound, atol=bound)
            assert_same_bits(got[rank], got[0])
    for handles in group.workspaces:
        _trtllm.trtllm_destroy_ipc_workspace_for_all_reduce(handles)


def test_refused_arguments_of_the_custom_all_reduce(device):
    group = custom_group(device)
    x, out, first = torch.ones(TOKENS, HIDDEN, device=device), torch.zeros(TOKENS, HIDDEN, device=device), None
    first = group.workspaces[0]
    for text, op, change in (
        ("token_num: got 7, wanted a divisor", Op.NONE, dict(token_num=7)),
        ("out: got shape", Op.NONE, dict(out=out[:2])),
        ("world_rank: got rank 1 of 3", Op.NONE, dict(tp_rank=1)),
        ("residual: got None", Op.RESIDUAL_RMS_NORM, {}),
        ("intermediate_buffer: got None", Op.RESIDUAL_RMS_NORM, dict(residual=x)),
        ("weight_pre_residual_norm: got None", Op.RESIDUAL_RMS_PREPOST_NORM, {}),
        ("peer_comm_buffer_ptrs: got an unknown", Op.NONE, dict(peer_comm_buffer_ptrs=torch.zeros(3).long())),
    ):
        with pytest.raises(ValueError, match=f"^trtllm_custom_all_reduce: {text}"):
            custom(0, first, x, **{"out": out, "op": op, **change})
    with pytest.raises(UnsupportedError, match="fusion_op_code: got RESIDUAL_RMS_NORM_QUANT_FP8"):
        custom(0, first, x, out, Op.RESIDUAL_RMS_NORM_QUANT_FP8)
    assert (out == 0).all(), "something was written"
    for handles in group.workspaces:
        _trtllm.trtllm_destroy_ipc_workspace_for_all_reduce(handles)


# The all-reduce in a shared buffer


def buffers(device: str, count: int) -> Ranks:
    return older(lambda rank, **given: cuda_ipc.create_shared_buffer(count, **given), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_in_a_shared_buffer(dtype, device):
    """Small inputs, inputs in several pieces, any shapes, and in place."""
    group = buffers(device, _vllm.vllm_meta_size() + 100)
    numbers = [
        _vllm.vllm_init_custom_ar(group.workspaces[rank], torch.empty(8, device=device), rank, True)
        for rank in range(SIZE)
    ]
    _vllm.vllm_register_buffer(numbers[0], group.workspaces[0])
    slot = _vllm._instances[numbers[0]].workspace._slot_bytes
    assert 900_000 < slot < 1 << 20  # a quarter of the inbox, for two slots of two peers
    for shape in ((3, 7), (512,), (2, slot // dtype.itemsize), (slot // dtype.itemsize + 1,), (0, 4)):
        parts = drawn(*shape, dtype=dtype, device=device)
        want, outs = summed(parts), [filled(x) for x in parts]

        def body(rank: int, _: Any, parts: Any = parts, outs: Any = outs) -> None:
            _vllm.vllm_all_reduce(numbers[rank], parts[rank], outs[rank], 0, 0, 16)
            _vllm.vllm_all_reduce(numbers[rank], parts[rank], parts[rank], 0, 0, 1)

        group.run(body)
        for x in (*parts, *outs):
            assert_same_bits(x, want)
    assert _vllm.vllm_get_graph_buffer_ipc_meta(numbers[0]) == ([], [])
    _vllm.vllm_register_graph_buffers(numbers[0], [[]] * SIZE, [[]] * SIZE)
    for rank, number in enumerate(numbers):
        _vllm.vllm_dispose(number)
        cuda_ipc.free_shared_buffer(group.workspaces[rank])
    with pytest.raises(ValueError, match="fa: got .*, wanted a number of vllm_init_custom_ar"):
        _vllm.vllm_dispose(numbers[0])


def test_captured_calls_in_a_shared_buffer(device):
    if device != "cuda":
        pytest.skip("needs a GPU")
    group = buffers(device, _vllm.vllm_meta_size())
    numbers = [_vllm.vllm_init_custom_ar(one, torch.empty(8), rank, True) for rank, one in enumerate(group.workspaces)]
    parts = drawn(4096, dtype=torch.float16, device=device)
    outs, graphs = [filled(x) for x in parts], [torch.cuda.CUDAGraph() for _ in parts]
    for rank in range(SIZE):
        with torch.cuda.graph(graphs[rank], stream=group.streams[rank]):
            for _ in range(2):
                _vllm.vllm_all_reduce(numbers[rank], parts[rank], outs[rank], 0, 0, 16)
        assert [len(one) for one in _vllm.vllm_get_graph_buffer_ipc_meta(numbers[rank])] == [128, 2]
        _vllm.vllm_register_graph_buffers(numbers[rank], [], [])
        assert _vllm.vllm_get_graph_buffer_ipc_meta(numbers[rank]) == ([], [])
    group.run(lambda rank, _: graphs[rank].replay())
    for x in outs:
        assert_same_bits(x, summed(parts))
    for rank, number in enumerate(numbers):
        _vllm.vllm_dispose(number)
        cuda_ipc.free_shared_buffer(group.workspaces[rank])


def test_a_rank_that_does_not_arrive(device, monkeypatch):
    monkeypatch.setenv("FLASHINFER_COMM_TIMEOUT", "2")
    group = buffers(device, _vllm.vllm_meta_size())
    numbers = [_vllm.vllm_init_custom_ar(one, torch.empty(8), rank, True) for rank, one in enumerate(group.workspaces)]
    x = torch.ones(64, device=device)

    def body(rank: int, _: Any) -> None:
        for _ in range(2 if rank < 2 else 0):
            _vllm.vllm_all_reduce(numbers[rank], x, torch.empty_like(x), 0, 0, 1)
            if device == "cuda":
                torch.cuda.current_stream().synchronize()

    for one in group.outcomes(body)[:2]:
        assert isinstance(one, GroupError) and one.ranks == (2,)
    for rank, number in enumerate(numbers):
        _vllm._instances[number].workspace._words[0] = 0  # an error that the test has seen
        _vllm.vllm_dispose(number)
        cuda_ipc.free_shared_buffer(group.workspaces[rank])


def test_refused_arguments_of_shared_buffers(device):
    large, small = buffers(device, _vllm.vllm_meta_size()), buffers(device, 16)
    data, mine = torch.empty(8), large.workspaces[0]
    for text, change in {
        "ipc_tensors: got other addresses": ([1, 2, 3], 0),
        "rank: got 1, wanted 0": (mine, 1),
        "ipc_tensors: got 16 bytes, wanted at least 4194304": (small.workspaces[0], 0),
    }.items():
        with pytest.raises(ValueError, match=f"^vllm_init_custom_ar: {text}"):
            _vllm.vllm_init_custom_ar(change[0], data, change[1], True)
    with pytest.raises(TypeError, match="^vllm_init_custom_ar: ipc_tensors: got NoneType, wanted a list of addresses"):
        _vllm.vllm_init_custom_ar(None, data, 0, True)
    number = _vllm.vllm_init_custom_ar(mine, data, 0, True)
    with pytest.raises(ValueError, match="ipc_tensors: got a buffer of another all-reduce"):
        _vllm.vllm_init_custom_ar(mine, data, 0, True)
    x = torch.ones(4, 4, device=device)
    for text, given in {
        "inp: got a tensor that is not contiguous": (x.T[:2], x[:2]),
        r"out: got \[2, 4\], wanted \[4, 4\]": (x, x[:2]),
    }.items():
        with pytest.raises(ValueError, match=f"^vllm_all_reduce: {text}"):
            _vllm.vllm_all_reduce(number, *given, 0, 0, 1)
    _vllm.vllm_dispose(number)
    for one in (*large.workspaces, *small.workspaces):
        cuda_ipc.free_shared_buffer(one)
        with pytest.raises(ValueError, match="^free_shared_buffer: pointers: got other addresses"):
            cuda_ipc.free_shared_buffer(one)
    meeting = Meeting(2)
    made = on_threads(
        2,
        lambda rank: cuda_ipc.create_shared_buffer(
            16 - 16 * rank, comm_backend=ThreadBackend(meeting, rank), device=device
        ),
    )
    assert {str(one) for one in made} == {"create_shared_buffer: size_in_bytes: got 0, wanted a positive number"}


def test_the_runtime_by_ctypes(device, tmp_path):
    """Memory that torch reads, the handle of another process, and CUDA's text of an error."""
    homes = (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    files = [file for home in homes if home for file in sorted(Path(home, "lib64").glob("libcudart.so*"))]
    if device == "cpu" and not files:
        pytest.skip("needs a CUDA runtime")
    runtime = cuda_ipc.CudaRTLibrary(None if device == "cuda" else str(files[0]))
    assert runtime.cudaGetErrorString(2) == "out of memory"
    runtime.CUDART_CHECK(0)
    with pytest.raises(RuntimeError, match="^CUDART error: invalid argument$"):
        runtime.CUDART_CHECK(1)
    with pytest.raises(OSError):
        cuda_ipc.CudaRTLibrary(str(tmp_path / "none.so"))
    if device == "cpu":
        if not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match="^CUDART error: "):
                runtime.cudaMalloc(16)
        return
    runtime.cudaSetDevice(torch.cuda.current_device())
    memory, got = runtime.cudaMalloc(64), torch.full((64,), 3, dtype=torch.uint8, device=device)
    runtime.cudaMemset(memory, 0x5A, 64)
    runtime.cudaMemcpy(ctypes.c_void_p(got.data_ptr()), memory, 64)
    runtime.cudaDeviceSynchronize()
    assert (got == 0x5A).all() and any(runtime.cudaIpcGetMemHandle(memory).internal)
    runtime.cudaFree(memory)


def test_no_runtime_is_loaded(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "_loaded_runtime", lambda: None)
    with pytest.raises(ValueError, match="CudaRTLibrary: so_file: got none, and no libcudart is loaded, wanted a path"):
        cuda_ipc.CudaRTLibrary()
