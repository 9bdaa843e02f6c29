"""Pages of docs/: their programs run, their links exist, their sentences are short."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer.cli.config import markdown_table

from ..support.prose import sentences, words

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
READ = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
PROGRAMS = ("start", "attention", "mla", "sampling", "gemm-moe", "linear-attention", "build")
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_program_of_a_page_runs(page):
    path = ROOT / "docs" / f"{page}.md"
    text = path.read_text()
    blocks = list(CODE.finditer(text))
    assert blocks
    names: dict[str, object] = {"__name__": page}
    for block in blocks:
        lines = "\n" * text[: block.start(1)].count("\n")  # so that errors name the page's lines
        exec(compile(lines + block.group(1), str(path), "exec"), names)


@pytest.mark.parametrize("page", READ, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in PAGES:
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name == "index.md" or name.startswith("api/") or f"]({name}" in index, name


def test_each_term_of_the_glossary_is_defined_somewhere():
    rows = re.findall(r"^\| .* \| `([\w./]+)` \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(rows) >= 40
    assert not [path for path in rows if not (ROOT / path).is_file()]


def test_the_table_of_variables_is_the_programs():
    text = (ROOT / "docs" / "environment.md").read_text()
    (table,) = re.findall(r"doctor --markdown -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    assert table == markdown_table(), "run: flashinfer doctor --markdown"


@pytest.mark.parametrize("page", READ, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_sentence_is_long(page):
    assert not [one for one in sentences(page.read_text()) if words(one) > 30]


def test_the_median_sentence_is_short():
    lengths = [words(one) for page in READ for one in sentences(page.read_text())]
    assert statistics.median(lengths) <= 15


def test_no_page_installs_the_other_project():
    for page in READ:
        assert not re.search(r"pip install [^\n]*flashinfer-python", page.read_text()), page.name


def test_the_page_of_results_is_made_of_the_files():
    command = [sys.executable, str(ROOT / "benchmarks" / "results.py"), "--check"]
    assert subprocess.run(command).returncode == 0, "run: python benchmarks/results.py"


def test_files_of_results_have_one_schema():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        about = json.loads(path.read_text())
        assert set(about) == {"benchmark", "family", "device", "date", "commit", "torch", "rows"}, path.name
        for row in about["rows"]:
            assert set(row) == {"shape", "unit", "ours", "peers", "of_floor", "more"}, path.name
