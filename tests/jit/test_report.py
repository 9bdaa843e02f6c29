"""Traces for Perfetto, and the page of build_aot.py, drawn by a browser if there is one."""

from __future__ import annotations

import html.parser
import itertools
import json
import os
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashinfer.cli import report
from flashinfer.cli.report import rows
from flashinfer.jit import history
from flashinfer.jit.build import make_request
from flashinfer.jit.history import Timeline, Unit, memory, save_timeline, trace_events
from flashinfer.jit.resolve import resolve

MIB = 1 << 20
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
UNITS = [
    Unit("reuse", "one_cpu", "a.o", "csrc/a.cc", 0.0, 0.0, 0, 50 * MIB),
    Unit("wait", "two_cuda", "b.o", "csrc/b.cu", -2.0, 1.0, 1),
    Unit("wait", "two_cuda", "c.o", "csrc/c.cc", 0.5, 1.5, 0),
    Unit("compile", "one_cpu", "d.o", "csrc/d.cc", 0.0, 1.5, 0, 100 * MIB),
    Unit("compile", "two_cuda", "b.o", "csrc/b.cu", 1.0, 4.0, 1, 900 * MIB),
    Unit("link", "one_cpu", "one_cpu.so", "link", 1.5, 2.0, 0, 40 * MIB),
]
TIMELINE = Timeline(1_700_000_000.0, "host<1>", 42, 2, UNITS)


def test_memory_is_the_sum_of_the_peaks_of_running_units():
    assert [(at, size // MIB) for at, size in memory(UNITS)] == [
        (0.0, 100),
        (1.0, 1000),
        (1.5, 940),
        (2.0, 900),
        (4.0, 0),
    ]


def test_rows_hold_one_unit_at_a_time():
    placed = rows(
        [replace(UNITS[0], start=start, end=end) for start, end in ((0, 4), (1, 2), (2, 3), (2.5, 5), (4, 6))]
    )
    assert [(unit.start, row) for unit, row in placed] == [(0, 0), (1, 1), (2, 1), (2.5, 2), (4, 0)]


def test_the_trace_is_in_the_trace_event_format():
    trace = json.loads(json.dumps(trace_events(TIMELINE)))
    events = trace["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert sorted(names.values()) == ["build on host<1> by process 42", "slot 0", "slot 1"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sorted(event["cat"] for event in spans) == ["compile", "compile", "link", "reuse"]
    waits = [(event["ph"], event["id"], event["name"], event["ts"]) for event in events if event.get("cat") == "wait"]
    assert waits == [
        ("b", 1, "two_cuda/b.o", 0), ("e", 1, "two_cuda/b.o", 3_000_000),
        ("b", 2, "two_cuda/c.o", 2_500_000), ("e", 2, "two_cuda/c.o", 3_500_000),
    ]  # fmt: skip
    (compiled,) = (event for event in spans if event["name"] == "two_cuda/b.o" and event["cat"] == "compile")
    assert names[compiled["tid"]] == "slot 1" and (compiled["ts"], compiled["dur"]) == (3_000_000, 3_000_000)
    assert compiled["args"] == {"module": "two_cuda", "source": "csrc/b.cu", "peak MiB": 900}
    for event in events:
        assert event["ph"] in "MXCbe" and {"name", "pid", "tid"} <= event.keys()
        assert isinstance(event["ts"], int) and event["ts"] >= 0
    for tid in names:
        mine = sorted((event["ts"], event["ts"] + event["dur"]) for event in spans if event["tid"] == tid)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(mine)), "lanes do not overlap"
    counters = [(event["ts"], event["args"]["MiB"]) for event in events if event["ph"] == "C"]
    assert counters == [(2_000_000, 100), (3_000_000, 1000), (3_500_000, 940), (4_000_000, 900), (6_000_000, 0)]


def test_every_build_leaves_a_trace_and_the_oldest_go(make_spec, workspace, monkeypatch):
    monkeypatch.setattr(history, "MAX_TRACES", 2)
    for name in ("one", "two", "three"):
        make_spec(name).build()
        (newest,) = workspace.glob(f"traces/*-{name}-{os.getpid()}.json")
        spans = [event for event in json.loads(newest.read_text())["traceEvents"] if event["ph"] == "X"]
        assert {(event["cat"], event["args"]["module"]) for event in spans} == {("compile", name), ("link", name)}
        assert all(event["dur"] > 0 and event["args"]["peak MiB"] > 0 for event in spans)
        # Builds within one second have no order.
        os.rename(newest, newest.with_name(f"2000{len(name)}{newest.name}"))
    assert len(list(workspace.glob("traces/*"))) == 2


def test_a_failed_build_leaves_a_trace_too(make_spec, workspace):
    (outcome,) = resolve([make_request(make_spec("bad", {"good.cc": "int x;\n", "bad.cc": "#error on purpose\n"}))])
    assert outcome.how == "failed"
    (trace,) = workspace.glob("traces/*-bad-*.json")
    spans = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert "bad/good.o" in spans


def test_a_trace_that_cannot_be_written_is_no_error(workspace):
    workspace.mkdir()
    (workspace / "traces").write_text("")
    save_timeline(TIMELINE, workspace)
    assert (workspace / "traces").read_text() == ""


def outcome(
    name: str, how: str, timeline: Timeline | None = None, size: int = 4096, seconds: float = 2.0, why: str = ""
):
    artifact = SimpleNamespace(manifest={"size": size, "seconds": seconds}) if how != "failed" else None
    identity = {"cxx": "12.2.0", "nvcc": "release 13.0" if "cuda" in name else None}
    archs = ("9.0a", "8.0") if "cuda" in name else ("x86-64-v3",)
    request = SimpleNamespace(spec=SimpleNamespace(name=name), archs=archs, identity=identity)
    error = SimpleNamespace(reason=why) if how == "failed" else None
    return SimpleNamespace(request=request, how=how, artifact=artifact, error=error, timeline=timeline)


HOSTILE = "</script><script>document.body.dataset.hacked = 1</script><!--"
OUTCOMES = [
    outcome("one_cpu", "built", TIMELINE),
    outcome("two_cuda", "failed", TIMELINE, why=f"error: {HOSTILE}"),
    outcome("three_cpu", "reused", size=1 << 20, seconds=30.0),
]


class Page(html.parser.HTMLParser):
    """The parts of a page that the tests check."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.scripts: dict[str, str] = {}
        self.inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = dict(attributes).get("id") or tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data
        elif data.strip():
            self.texts.append(data.strip())


def test_the_page_shows_built_reused_and_failed_modules():
    text = report.render(OUTCOMES, 4.0)
    page = Page(text)
    words = " ".join(page.texts)
    for fact in ("3 modules of flashinfer", "1 built, 1 reused, 1 failed", "5.0 s of compiling, 1.2 at once", "33%",
                 "30.0 s of compiling saved", "1000 MiB", "objects of an interrupted build", "cxx 12.2.0", "nvcc release 13.0",
                 "host<1>", "2 jobs at most", "9.0a 8.0", f"error: {HOSTILE}"):  # fmt: skip
        assert fact in words, fact
    order = [words.index(file) for file in ("b.cu", "d.cc", "one_cpu.so")]
    assert order == sorted(order), "the slowest unit comes first"


def test_the_page_escapes_the_timeline():
    units = [replace(UNITS[3], module=HOSTILE, source=HOSTILE), UNITS[4]]
    page = Page(report.render([outcome("one_cpu", "built", replace(TIMELINE, units=units))], 4.0))
    data = json.loads(page.scripts["data"])
    assert data["units"] == [{**asdict(unit), "row": row} for row, unit in enumerate(units)]
    assert data["rows"] == ["slot 0", "slot 1"] and (data["begins"], data["ends"]) == (0.0, 4.0)
    assert data["memory"] == [[0.0, 100 * MIB], [1.0, 1000 * MIB], [1.5, 900 * MIB], [4.0, 0]]
    assert sum(tag == "script" for tag, _ in page.tags) == 2


def test_runs_of_one_build_share_a_clock():
    later = Timeline(TIMELINE.began + 10, "host", 42, 2, [UNITS[0], replace(UNITS[3], start=10.0, end=11.5)])
    merged = report.merged([later, TIMELINE, later, replace(TIMELINE)])
    assert merged.began == TIMELINE.began and len(merged.units) == len(UNITS) + 1
    assert (merged.units[-1].start, merged.units[-1].end) == (10.0, 11.5)


def test_the_page_needs_no_network():
    text = report.render(OUTCOMES, 4.0)
    policy = next(attributes["content"] for tag, attributes in Page(text).tags if attributes.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    for tag, attributes in Page(text).tags:
        for name in ("src", "href", "action", "data", "srcset"):
            assert attributes.get(name, "data:").startswith("data:"), (tag, attributes)
    script = Page(text).scripts["script"].replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(
        r"https?://|fetch\(|XMLHttpRequest|import\(|@import|url\(", script + Page(text).scripts["style"]
    )
    assert "prefers-color-scheme: dark" in text


def test_a_build_with_nothing_to_do_has_a_page_without_a_timeline():
    page = Page(report.render([outcome("three_cpu", "reused")], 0.1))
    assert any("nothing was compiled" in text for text in page.texts)
    assert not any(attributes.get("id") == "timeline" for _, attributes in page.tags)
    assert "100%" in page.texts
    Page(report.render([], 0.0))


@pytest.mark.parametrize(
    "length, text", [(0.0004, "0 ms"), (0.25, "250 ms"), (1.24, "1.2 s"), (99.0, "99.0 s"), (754.0, "12 min 34 s")]
)
def test_times_read_well(length, text):
    assert report.seconds(length) == text


def browse(page: Path, folder: Path) -> tuple[str, str]:
    """Return a page's elements after its script ran in a browser, and the browser's errors."""
    quiet = ("background-networking", "component-update", "sync", "gpu", "quic", "dev-shm-usage", "extensions")
    command = [BROWSER, "--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in quiet)]
    command += ["--enable-logging=stderr", f"--user-data-dir={folder}", "--window-size=1200,900", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(BROWSER is None, reason="needs chromium; the page is parsed all the same")
def test_a_browser_draws_every_unit_and_complains_of_nothing(tmp_path):
    page = tmp_path / "build.html"
    page.write_text(report.render(OUTCOMES, 4.0))
    drawn, complaints = browse(page, tmp_path / "profile")
    assert complaints == ""
    boxes = re.findall(r'<rect class="unit (\w+)"', drawn)
    assert sorted(boxes) == sorted(["reuse", "wait", "wait", "cxx", "nvcc", "link"])
    assert f'data-units="{len(UNITS)}"' in drawn and "data-hacked" not in drawn
    assert 'class="memory"' in drawn and drawn.count("<text") > 5
    assert re.findall(r"</i>([^<]+)</span>", drawn) == ["C++", "nvcc", "link", "resumed", "waiting", "memory, at most"]


@pytest.mark.skipif(BROWSER is None, reason="needs chromium; the page is parsed all the same")
def test_a_browser_shows_an_error_of_the_script(tmp_path):
    page = tmp_path / "broken.html"
    page.write_text(report.render(OUTCOMES, 4.0).replace("  draw();", "  drawn();"))
    drawn, complaints = browse(page, tmp_path / "profile")
    assert "drawn is not defined" in complaints and "data-units" not in drawn
