"""Tests of ``flashinfer.warmup``: it loads modules before a capture. A first use within a capture raises an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer.errors import CaptureError, JitFrozenError
from flashinfer.jit import freeze
from flashinfer.jit.modules.cascade import gen_cascade_module
from flashinfer.jit.modules.norm import gen_norm_module
from flashinfer.jit.specjson import to_json

from ..support.attention_oracle import assert_near, attention, drawn, variant_dtype, workspace
from ..support.tree import clean_environment

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-DWARM_UP=1 -O0"  # no prebuilt modules
FRESH = """
import json, sys, torch, flashinfer
device, path = sys.argv[1:]
x = torch.ones(3, 64, device=device, dtype=torch.float16)

def step(x, scale):
    y = flashinfer.rmsnorm(x, x[0]) * scale
    return flashinfer.single_prefill_with_kv_cache(y[:, None], y[:, None], y[:, None])

def told(found):
    return [(one.name, one.how, one.ms > 0) for one in found]

first = told(flashinfer.warmup(step, x, scale=2))
again = told(flashinfer.warmup(step, x, 2))
specs = told(flashinfer.warmup([flashinfer.gen_norm_module(device), flashinfer.gen_cascade_module(device)]))
file = told(flashinfer.warmup(path))
with flashinfer.jit.freeze():
    flashinfer.merge_state(x[:, None], x[:, None, 0].float(), x[:, None], x[:, None, 0].float())
print(json.dumps([first, again, specs, file]))
"""


def run(device: str, place: Path, specs: Path) -> list[list[list[object]]]:
    environment = clean_environment(FLASHINFER_WORKSPACE_DIR=place, FLASHINFER_EXTRA_CFLAGS=FLAGS)
    command = [sys.executable, "-c", FRESH, device, str(specs)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def written(path: Path, *specs) -> Path:
    lines = [{"spec": to_json(spec), "key": spec.key, "needs": {}, "archs": []} for spec in specs]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path.chmod(0o644)
    return path


def test_a_function_and_specs_in_a_fresh_process(device, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", FLAGS)
    path = written(tmp_path / "specs.jsonl", gen_norm_module(device), gen_cascade_module(device))
    norm, cascade, attention = f"norm_{device}", f"cascade_{device}", f"prefill_f16_d64_{device}"
    for how in ("built", "hit"):
        first, again, specs, file = run(device, tmp_path / "cache", path)
        assert first == [[norm, how, True], [attention, how, True]] and again == []
        assert specs == [[norm, "present", False], [cascade, how, True]]
        assert file == [[cascade, "present", False], [norm, "present", False]]


def test_invalid_arguments_of_warmup(tmp_path: Path):
    with pytest.raises(TypeError, match="warmup: what: got int, wanted specs, a path or a function"):
        flashinfer.warmup(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got a str among specs, wanted JitSpec"):
        flashinfer.warmup(["norm_cpu"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="got list with arguments, wanted a function with them"):
        flashinfer.warmup([], 3)
    with pytest.raises(ValueError, match=r"warmup: .*nothing.jsonl cannot be read"):
        flashinfer.warmup(tmp_path / "nothing.jsonl")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    (tmp_path / "bad.jsonl").chmod(0o644)
    with pytest.raises(ValueError, match=r"warmup: .*bad.jsonl, line 1: got another line"):
        flashinfer.warmup(str(tmp_path / "bad.jsonl"))
    assert flashinfer.warmup([]) == []


def test_an_error_of_the_function_is_the_callers(device):
    def step(x: torch.Tensor) -> None:
        flashinfer.packbits(x)
        raise KeyError("step")

    with pytest.raises(KeyError, match="step"):
        flashinfer.warmup(step, torch.ones(3, dtype=torch.bool, device=device))
    flashinfer.packbits(torch.ones(3, dtype=torch.bool, device=device))


def test_gradients_are_recorded(device):
    x, seen = torch.randn(3, 8, device=device, requires_grad=True), []
    flashinfer.warmup(lambda: seen.append(flashinfer.rmsnorm(x, x[0].detach())))
    seen[0].sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


def test_missing_modules_after_freeze_are_an_error(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", str(tmp_path))
    own = flashinfer.jit.gen_customize_single_decode_module(
        "never_built",
        "float16",
        "float16",
        "float16",
        64,
        64,
        [],
        [],
        [],
        [],
        "Never",
        "struct Never {};",
        device="cpu",
    )
    with freeze(), pytest.raises(JitFrozenError, match="never_built"):
        flashinfer.warmup([own])


# Captures. Without a GPU, a capture is simulated: the checks run before any call of CUDA.


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_no_warmup_and_no_plan_in_a_capture(capturing):
    with pytest.raises(CaptureError, match="warmup: modules would be loaded, which would invalidate the CUDA graph"):
        flashinfer.warmup(lambda: None)
    ints = torch.tensor([0, 1], dtype=torch.int32)
    room, shape = workspace("cpu"), (4, 2, 64)
    plans = {
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(room): (ints, ints[:1], ints[1:], *shape, 16),
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(room): (ints, ints, ints[:1], ints[1:], *shape, 16),
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper(room): (ints, ints, *shape),
        flashinfer.PODWithPagedKVCacheWrapper(room): (ints, ints[:1], ints[1:], *shape, 16),
        flashinfer.MultiLevelCascadeAttentionWrapper(1, room): (
            [ints], [ints], [ints[:1]], [ints[1:]], *shape, 16,
        ),
        flashinfer.BatchAttention(): (ints, ints, ints[:1], ints[1:], 4, 2, 64, 64, 16),
        flashinfer.BlockSparseAttentionWrapper(room): (ints, ints[:1], 4, 4, 4, 4, *shape),
        flashinfer.VariableBlockSparseAttentionWrapper(room): (
            torch.ones(2, 1, 1).bool(), ints[1:].expand(2, 1), ints[1:].expand(2, 1), *shape,
        ),
    }  # fmt: skip
    for wrapper, arguments in plans.items():
        with pytest.raises(CaptureError, match=r"plan\(\): .* call it before the capture"):
            wrapper.plan(*arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_first_use_in_a_capture():
    """A new process gets a typed error, which does not end the capture. After a warm-up by specs, the capture works."""
    program = """
import torch, flashinfer
from flashinfer.errors import CaptureError
x, w = torch.randn(5, 64, device="cuda").half(), torch.randn(64, device="cuda").half()
graph, y = torch.cuda.CUDAGraph(), torch.zeros_like(x)
with torch.cuda.graph(graph):
    y.copy_(x * 2)
    try:
        flashinfer.rmsnorm(x, w)
    except CaptureError as err:
        assert "flashinfer.warmup()" in str(err)
    else:
        raise SystemExit("captured")
    y.add_(1)
graph.replay()
torch.testing.assert_close(y, x * 2 + 1)
flashinfer.warmup([flashinfer.gen_norm_module("cuda")])
again = torch.cuda.CUDAGraph()
with torch.cuda.graph(again):
    z = flashinfer.rmsnorm(x, w)
for _ in range(3):
    x.copy_(torch.randn(5, 64))
    again.replay()
    torch.testing.assert_close(z, flashinfer.rmsnorm(x, w), rtol=0, atol=0)
"""
    environment = clean_environment(FLASHINFER_WORKSPACE_DIR=os.environ.get("FLASHINFER_WORKSPACE_DIR", ""))
    if not environment["FLASHINFER_WORKSPACE_DIR"]:
        del environment["FLASHINFER_WORKSPACE_DIR"]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alibi_in_a_capture_reads_nothing_from_the_host(device):
    """Slopes are computed on the device. A GPU replays with new values."""
    q, k, v = (drawn((n, h, 64), variant_dtype(device), device) for n, h in ((7, 6), (19, 2), (19, 2)))
    run = lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, pos_encoding_mode="ALIBI")  # noqa: E731
    flashinfer.warmup(run)
    graph = None
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
    for _ in range(3):
        q.copy_(drawn(q.shape, q.dtype, device))
        if graph is None:
            out = run()
        else:
            graph.replay()
        assert_near(out, attention(q, k, v, pos_encoding_mode="ALIBI")[0])
