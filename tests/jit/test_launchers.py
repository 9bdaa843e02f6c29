"""Compiler launchers of Debian. None is part of a key, and none changes a byte."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from ..support.processes import answer, answering


@pytest.mark.parametrize("launcher", ["ccache", "sccache", "icecc"])
def test_a_launcher_changes_nothing(launcher, make_spec, tmp_path, monkeypatch):
    if shutil.which(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    spec = make_spec("launched", answering(5))
    plain = spec.build()
    for name in ("CCACHE_DIR", "SCCACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setenv("SCCACHE_SERVER_PORT", "14226")
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", launcher)
    try:
        for number in range(2):
            monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", str(tmp_path / f"workspace{number}"))
            built = spec.build()
            assert built.manifest["build_key"] == plain.manifest["build_key"] and answer(built) == 5
            assert built.path.read_bytes() == plain.path.read_bytes()
    finally:
        if launcher == "sccache":
            subprocess.run([launcher, "--stop-server"], capture_output=True)
    if launcher == "ccache":
        said = subprocess.run([launcher, "--print-stats"], capture_output=True, text=True, check=True).stdout
        hits = sum(map(int, re.findall(r"^(?:direct|preprocessed)_cache_hit\s+(\d+)$", said, re.MULTILINE)))
        assert hits == 1, "a fresh workspace compiles nothing again"
