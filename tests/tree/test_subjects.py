"""The check of commit subjects accepts exactly those that CONTRIBUTING allows."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[2] / ".ci" / "check_subjects"

pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None or shutil.which("awk") is None, reason="needs bash and awk"
)


@pytest.mark.parametrize(
    ("subject", "passes"),
    [
        ("norm: round once", True),
        ("fused_moe, gemm: share a tile", True),
        ("Norms are rounded once", False),
        ("norm: round once; rope: turn twice", False),
        ("norm: " + "x" * 66, True),
        ("norm: " + "x" * 67, False),
    ],
)
def test_a_subject(subject, passes):
    done = subprocess.run([CHECK], input=subject + "\n", capture_output=True, text=True)
    assert (done.returncode == 0) is passes, done.stdout


def test_every_line_is_checked():
    done = subprocess.run([CHECK], input="norm: round once\nBad\nrope: turn\n", capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "subject: Bad\n"
    assert subprocess.run([CHECK], input="", text=True).returncode == 0
