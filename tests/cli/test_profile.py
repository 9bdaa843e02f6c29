"""``python -m flashinfer profile``: traces for Perfetto of every kernel that it supports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flashinfer.cli.main import main
from flashinfer.cli.profile import KERNELS


def check_trace(trace: dict[str, Any]) -> int:
    """Check the schema of Chrome's format with nested, ordered events per thread.

    Return the number of spans.
    """
    assert trace["displayTimeUnit"] == "ns" and trace["otherData"]["unbalanced"] == 0
    open_spans: dict[tuple[int, int], list[str]] = {}
    times: dict[tuple[int, int], float] = {}
    spans = 0
    for event in trace["traceEvents"]:
        assert event["ph"] in {"B", "E", "M", "i"}
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        place = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "process_sort_index", "thread_name"}
            continue
        assert event["ts"] >= times.get(place, 0.0)
        times[place] = event["ts"]
        if event["ph"] == "B":
            open_spans.setdefault(place, []).append(event["name"])
        elif event["ph"] == "E":
            assert open_spans[place].pop() == event["name"]
            spans += 1
    assert not any(open_spans.values())
    return spans


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("kernel", KERNELS)
def test_traces(kernel, device, tmp_path, capsys):
    """The sizes are those of other tests, so that nothing is compiled only for this one."""
    place, page = tmp_path / "trace.json", tmp_path / "trace.html"
    sizes = ["--batch", "2", "--kv-len", "300", "--heads", "8", "--kv-heads", "2", "--head-dim", "64"]
    arguments = ["profile", kernel, "--out", str(place), "--html", str(page), "--device", device, "--json", *sizes]
    assert main(arguments) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["kernel"] == kernel and row["dropped"] == 0 and row["tracks"] > 0
    trace = json.loads(place.read_text())
    assert 2 * check_trace(trace) == row["events"] == trace["otherData"]["events"] > 10
    assert f"{kernel} on {device}: batch 2, kv len 300" in page.read_text()


def test_a_buffer_that_is_too_small_is_reported(tmp_path, capsys, caplog):
    place = tmp_path / "trace.json"
    sizes = ["--batch", "2", "--kv-len", "300", "--heads", "8", "--words", "16"]
    assert main(["profile", "mla", "--out", str(place), "--device", "cpu", "--json", *sizes]) == 0
    assert json.loads(capsys.readouterr().out)[0]["dropped"] > 0 and "events were dropped" in caplog.text
    assert json.loads(place.read_text())["otherData"]["dropped"] > 0


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["mla", "--device", "tpu"], "--device: got tpu, wanted cpu"),
        (["decode", "--device", "cpu", "--qo-len", "3"], "--qo-len: got 3, wanted 1 for decode"),
        (["prefill", "--device", "cpu", "--backend", "fa3"], "backend: got 'fa3'"),
        (["mla", "--html", "nowhere/page.html"], "--html: .* is not a directory"),
        (["decode", "--device", "cpu", "--heads", "3", "--kv-heads", "2"], "num_qo_heads: got 3"),
    ],
)
def test_bad_options(arguments, text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments, "--out", "trace.json"]) == 2
    assert re.search(f"error: .*{text}", capsys.readouterr().err)
    assert not Path("trace.json").exists()


@pytest.mark.parametrize("arguments", [["mla"], ["gemm", "--out", "x"], ["mla", "--out", "x", "--batch", "0"]])
def test_bad_commands(arguments):
    with pytest.raises(SystemExit) as caught:
        main(["profile", *arguments])
    assert caught.value.code == 2
