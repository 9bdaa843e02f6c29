"""Tests under ``torch.set_default_device``: the library places every tensor by its arguments.

The default device is meta, which shows a misplaced tensor on a machine without a GPU.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import flashinfer

from ..support.attention_oracle import int32, variant_dtype, workspace
from ..support.attention_samples import samples, tables
from ..support.mla_samples import SCALE, Batch
from ..support.samples import attention_cases, public_cases

PACKAGE = str(Path(flashinfer.__file__).parent)


class DefaultDeviceOfTheLibrary(TorchFunctionMode):
    """Act as ``torch.device("meta")`` for factory calls of the library, and leave a test's own tensors on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            frame = sys._getframe(1)
            while "/torch/" in frame.f_code.co_filename and frame.f_back is not None:
                frame = frame.f_back
            if frame.f_code.co_filename.startswith(PACKAGE):
                kwargs = kwargs | {"device": "meta"}
        return func(*args, **kwargs)


def results(result: object) -> list[torch.Tensor]:
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def copies(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


@pytest.mark.parametrize("name", list(public_cases("cpu")))
def test_functions(name, device):
    case = public_cases(device)[name]
    arguments, given = (copies(one) for one in [case.arguments(9)] * 2)
    want = [*results(case.function(**arguments)), *results(list(arguments.values()))]
    with torch.device("meta"):
        got = [*results(case.function(**given)), *results(list(given.values()))]
    for one, other in zip(got, want, strict=True):
        assert one.device.type == device
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in attention_cases("cpu") if "decode" not in name])
def test_gradients_of_attention(name, device):
    case = attention_cases(device)[name]
    given = {key: x.requires_grad_() for key, x in case.arguments(9).items()}
    weights = torch.randn_like(case.function(**given))
    leaves = [given[key] for key in case.differentiable]
    want = torch.autograd.grad(case.function(**given), leaves, weights)
    with torch.device("meta"):
        got = torch.autograd.grad(case.function(**given), leaves, weights)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", list(samples("cpu")))
def test_plans_and_runs_of_attention(name, device, fresh_seed):
    torch.manual_seed(fresh_seed)
    sample = samples(device)[name]
    sample.plan(9)
    inputs = sample.inputs(9)
    want = results(sample.function(**inputs))
    torch.manual_seed(fresh_seed)
    with DefaultDeviceOfTheLibrary():
        sample = samples(device)[name]
        sample.plan(9)
        got = results(sample.function(**inputs))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("causal", [False, True])
def test_plans_of_sparse_masks(causal, device):
    """Causal block masks whose keys do not end at the last query. The samples have no such mask."""
    q, k, v = (torch.randn(12, 2, 64, device=device).half() for _ in range(3))

    def run() -> list[torch.Tensor]:
        sparse = flashinfer.BlockSparseAttentionWrapper(workspace(device))
        sparse.plan(int32([0, 1, 3, 4]), int32([2, 0, 1, 0]), 12, 12, 4, 4, 2, 2, 64, causal=causal)
        variable = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))
        there = torch.tensor([[[True, True, False], [True, False, True]]] * 2)
        sizes = int32([[5, 7]] * 2), int32([[2, 4, 6]] * 2)
        variable.plan(there, *sizes, 2, 2, 64, causal=causal)
        by_head = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        return [sparse.run(q, k, v), variable.run(*by_head)]

    want = run()
    with DefaultDeviceOfTheLibrary():
        got = run()
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_uncached_alibi_slopes(device):
    """Slopes are cached by number of heads, so the test uses a new number."""
    q, k, v = (torch.randn(9, 23, 64, device=device).to(variant_dtype(device)) for _ in range(3))
    with torch.device("meta"):
        got = flashinfer.single_prefill_with_kv_cache(q, k, v, pos_encoding_mode="ALIBI")
        assert flashinfer.utils.get_alibi_slopes(23).device.type == "cpu"
    distance = torch.arange(9)[:, None] - torch.arange(9)
    slopes = flashinfer.utils.get_alibi_slopes(23)[:, None, None].double()
    logits = torch.einsum("qhd,khd->hqk", q.double().cpu(), k.double().cpu()) / 8 - slopes * distance
    want = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v.double().cpu())
    torch.testing.assert_close(got.cpu().double(), want, rtol=2e-2, atol=2e-3)


def test_plans_and_runs_of_latent_attention(device):
    batch = Batch([1, 1], [70, 20], 16, 16, torch.bfloat16, device)
    with DefaultDeviceOfTheLibrary():
        batch.check(*batch.planned().run(*batch.inputs, return_lse=True))
        # A wrapper that plans in run(), and one with lengths from last pages.
        pages = torch.nn.utils.rnn.pad_sequence(list(batch.tables[2].split([5, 2])), batch_first=True)
        batch.check(batch.planned().run(*batch.inputs, kv_len=batch.lens, page_table=pages))
        decode = flashinfer.BatchDecodeMlaWithPagedKVCacheWrapper(workspace(device))
        last = int32([70 - 64, 20 - 16])
        decode.plan(*batch.tables[1:3], last, 16, 512, 16, SCALE, data_type=torch.bfloat16)
        batch.check(decode.run(*batch.inputs))


@pytest.mark.parametrize("graph", [False, True])
def test_fast_decode_plan(graph, device):
    """fast_decode_plan() with page size 1 does not read last_page_len."""
    _, indices, _, lens = tables(5)
    counts = torch.tensor(lens)
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    indices = torch.randperm(sum(lens)).int().to(device)
    buffers = (indptr.to(device).clone(), indices.clone(), int32([1] * 5).to(device)) if graph else ()
    q = torch.randn(5, 4, 64, device=device).half()
    cache = torch.randn(sum(lens), 2, 1, 2, 64, device=device).half()

    def run(wrap: Any) -> torch.Tensor:
        wrapper = wrap(workspace(device), "NHD", graph, False, *buffers)
        plan = partial(flashinfer.decode.fast_decode_plan, wrapper)
        last = torch.empty(5, dtype=torch.int32, device="meta" if device == "cpu" else device)
        plan(indptr.to(device), indices, last, 4, 2, 64, 1, global_override_indptr_cpu=indptr)
        assert wrapper._pin_memory_int_workspace_buffer.device.type == "cpu"
        return wrapper.run(q, cache)

    want = run(flashinfer.BatchDecodeWithPagedKVCacheWrapper)
    with DefaultDeviceOfTheLibrary():
        got = run(flashinfer.BatchDecodeWithPagedKVCacheWrapper)
    torch.testing.assert_close(got, want)


def test_factory_calls_name_a_device():
    """Factory calls of the package name a device. The command line is a program of its own."""
    factories = {constructor.__name__ for constructor in _device_constructors()}
    found = [
        f"{path.relative_to(PACKAGE)}:{call.lineno}: {ast.unparse(call)}"
        for path in sorted(Path(PACKAGE).rglob("*.py"))
        if path.parent.name != "cli"
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in factories
        if ast.unparse(call.func.value) == "torch" and not {"device", None} & {word.arg for word in call.keywords}
    ]
    assert not found


PROGRAM = """
import torch
torch.set_default_device("meta")
import flashinfer
from flashinfer._attention.plan import as_shape
with torch.device("cpu"):
    indptr, q = torch.tensor([0, 3, 8], dtype=torch.int32), torch.randn(8, 2, 64)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
wrapper.plan(indptr, indptr, 2, 2, 64, q_data_type=torch.float32)
assert wrapper.run(q, q, q).isfinite().all() and as_shape([1]).device.type == "cpu"
"""


def test_a_program_that_sets_it_before_the_import():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
