"""The page with a timeline: its contents, and its elements in a browser."""

from __future__ import annotations

import json
import re

import pytest
import torch

from flashinfer import profiler
from flashinfer._profiler import page
from flashinfer._profiler.buffer import CYCLES

from ..jit.test_report import BROWSER, Page, browse
from .test_buffer import BEGIN, END, INSTANT, buffer_of

NAMES = ["load", "compute", "wait-k", "</script><script>document.documentElement.dataset.hacked = 1</script>"]
EVENTS = [
    (BEGIN, 1, 500),
    (BEGIN, 0, 700),
    (END, 0, 900),
    (INSTANT, 3, 1000),
    (BEGIN, 2, 1500),
    (END, 2, 2400),
    (END, 1, 9000),
]
TRACKS = [((sm, 0, 1000), (10_000, 6000), EVENTS) for sm in (3, 3, 7, 7)]


def written(tmp_path, buffer: torch.Tensor) -> str:
    profiler.export_to_html(buffer, NAMES, tmp_path / "page.html", "Two <b>blocks</b>")
    return (tmp_path / "page.html").read_text()


def test_the_page_holds_every_span_and_fetches_nothing(tmp_path):
    text = written(tmp_path, buffer_of(TRACKS, groups=2, clock=CYCLES))
    parsed = Page(text)
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", text) and "url(" not in text and "import " not in text
    data = json.loads(re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[0])
    assert [(row["place"], row["name"], row["depth"]) for row in data["rows"]] == [
        ("SM 3", "warpgroup 0", 2), ("SM 3", "warpgroup 1", 2), ("SM 7", "warpgroup 0", 2), ("SM 7", "warpgroup 1", 2),
    ]  # fmt: skip
    names = data["names"]
    assert sorted(names) == sorted(NAMES)
    for row in data["rows"]:
        assert [(names[name], start, length, depth, kind) for name, start, length, depth, kind in row["spans"]] == [
            ("compute", 0.0, 4250.0, 0, 0), ("load", 100.0, 100.0, 1, 0), (NAMES[3], 250.0, 0.0, 1, 2),
            ("wait-k", 500.0, 450.0, 1, 0),
        ]  # fmt: skip
    assert {"4.25 µs", "Two <b>blocks</b>"} <= set(parsed.texts)
    table = [one for one in parsed.texts if one in NAMES]
    assert table == ["compute", "wait-k", "load"], "the table sorts events by time, and has no instants"


def test_a_page_of_no_event_says_so(tmp_path):
    buffer = torch.zeros(8, dtype=torch.int64)
    buffer[0] = 132 | 3 << 32 | CYCLES << 48
    assert "No event was recorded." in written(tmp_path, buffer)


@pytest.mark.parametrize(
    "ns, text",
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1 µs"),
        (12_345, "12.3 µs"),
        (999_900, "1000 µs"),
        (4.2e6, "4.2 ms"),
        (2e9, "2 s"),
    ],
)
def test_times_read_well(ns, text):
    assert page.duration(ns) == text


def test_surplus_spans_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MOST_SPANS", 8)
    parsed = Page(written(tmp_path, buffer_of(TRACKS, groups=2, clock=CYCLES)))
    assert "8 spans are not drawn" in parsed.texts


@pytest.mark.skipif(BROWSER is None, reason="needs chromium; the page is parsed all the same")
def test_a_browser_draws_every_span_and_complains_of_nothing(tmp_path):
    written(tmp_path, buffer_of(TRACKS, groups=2, clock=CYCLES))
    drawn, complaints = browse(tmp_path / "page.html", tmp_path / "profile")
    assert complaints == ""
    assert 'data-spans="16"' in drawn and "data-hacked" not in drawn
    assert len(re.findall(r"<i style=", drawn)) == len(NAMES)


@pytest.mark.skipif(BROWSER is None, reason="needs chromium; the page is parsed all the same")
def test_a_browser_shows_an_error_of_the_script(tmp_path):
    text = written(tmp_path, buffer_of(TRACKS, groups=2, clock=CYCLES))
    (tmp_path / "page.html").write_text(text.replace("  draw();\n}\n</script>", "  drawn();\n}\n</script>"))
    drawn, complaints = browse(tmp_path / "page.html", tmp_path / "profile")
    assert "drawn is not a function" in complaints and "data-spans" not in drawn
