"""The README's examples run, its table is the program's own, and the files it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashinfer.cli.config import markdown_table

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_run(number):
    example = EXAMPLES[number]
    assert len([line for line in example.splitlines() if line.strip()]) <= 8
    exec(compile(example, "README.md", "exec"), {})


def test_there_is_an_example():
    assert EXAMPLES


def test_the_table_of_variables_is_the_programs():
    (table,) = re.findall(
        r"<!-- python -m flashinfer show-config --markdown -->\n(.*?)\n<!-- end -->", README, re.DOTALL
    )
    assert table == markdown_table(), "run: python -m flashinfer show-config --markdown"


def test_every_named_path_exists():
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text()
        for path in re.findall(r"`((?:flashinfer|csrc|include|scripts|tests|benchmarks|\.ci)/[\w./-]*)`", text):
            if "scale" not in path:  # CONTRIBUTING's imagined family
                assert (ROOT / path).exists(), f"{document} names {path}"


def test_every_benchmark_is_named():
    there = {path.name for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert there == set(re.findall(r"python benchmarks/(bench_\w+\.py)", README))
