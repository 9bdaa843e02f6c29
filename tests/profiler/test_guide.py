"""docs/profiling.md: its program runs as written, and it names every event."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flashinfer.profiler import EVENT_NAMES

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "profiling.md").read_text()


@pytest.mark.slow
def test_the_program_runs(tmp_path, monkeypatch):
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/profiling.md", "exec"), {})
    assert json.loads(Path("mla.json").read_text())["otherData"]["events"] > 20
    assert Path("mla.html").read_text().startswith("<!doctype html>")


def test_every_event_is_explained():
    table = TEXT[TEXT.index("| event |") : TEXT.index("On Hopper, wgmma")]
    assert sorted(re.findall(r"`([\w-]+)`", re.sub(r"\|[^|]*\|$", "", table, flags=re.MULTILINE))) == sorted(
        EVENT_NAMES
    )
