"""FLASHINFER_JIT_DEBUG=1: kernels stop at a page outside the cache before reading it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..support.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import torch
import flashinfer

def table(*values):
    # On the GPU, because plan() checks pages on the CPU.
    return torch.tensor(values, dtype=torch.int32, device="cuda")


cache = torch.ones(4, 2, 16, 2, 64, dtype=torch.float16, device="cuda")
wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(32 << 20, dtype=torch.uint8, device="cuda"))
wrapper.plan(table(0, 3), table(1, int(sys.argv[1]), 2), table(5), 8, 2, 64, 16)
out = wrapper.run(torch.ones(1, 8, 64, dtype=torch.float16, device="cuda"), cache)
torch.cuda.synchronize()
print("mean", out.mean().item())
"""


def run(page: int) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "FLASHINFER_JIT_DEBUG": "1", "PYTHONPATH": python_path(ROOT)}
    return subprocess.run([sys.executable, "-c", SCRIPT, str(page)], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_page_outside_the_cache_stops_the_kernel():
    inside = run(3)
    assert "mean 1.0" in inside.stdout, inside.stdout + inside.stderr
    for page in (4, -1, 2**31 - 1):
        outside = run(page)
        assert outside.returncode != 0
        assert f"is on page (row, where ragged) {page} of a cache of 4" in outside.stdout, outside.stderr
